#!/usr/bin/env bash
#SBATCH --job-name=base-1b-12345678
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Trains base-1b-12345678, and starts again until it is done or of no use.

# Process 0, at a port that no other job on its node has.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" >/dev/null &&
	[[ $(scontrol show node --oneliner "$first") =~ NodeAddr=([^ ]+) ]]; then
	first=${BASH_REMATCH[1]}
fi
export JAX_COORDINATOR_ADDRESS=$first:$((20000 + SLURM_JOB_ID % 12000))

export PYTHONPATH=/root
export A='b $c'
export NCCL_DEBUG=INFO

tasks=2
srun=(
	srun
	--nodes=2
	--ntasks=2
	--ntasks-per-node=1
	--kill-on-bad-exit=0
	--wait=600
	--export=ALL
)
srun_one=(
	srun
	--nodes=1
	--ntasks=1
	--ntasks-per-node=1
	--export=ALL
)
train=(
	python
	-P
	-m
	train
	model=gpt_nano
	'run.dir="/runs/base-1b"'
)
status=(
	python
	-P
	-m
	train.status
	'run.dir="/runs/base-1b"'
	json=true
)

folder=/runs/base-1b/launch/1
diary=/runs/base-1b/launch/1/attempts.jsonl
stop=/runs/base-1b/launch/1/stop
exclude=''
stopped=130
crashes_again=70
same_step=3
max_restarts=10
chosen=0
never_again=(130 78 4 65 3 70)
again=(42 134 75)
pauses=(10 20 40 80 160 320 600 600 600 600)

