#!/usr/bin/env bash
#SBATCH --job-name=base-1b-12345678
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=1-00:00:00
#SBATCH --partition=batch
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --exclusive

# Trains base-1b-12345678, and starts again until it is done or of no use.

export JAX_COMPILATION_CACHE_DIR=/runs/base-1b/compilation_cache

module load slurm

# Process 0, at a port that no other job on its node has.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" >/dev/null &&
	[[ $(scontrol show node --oneliner "$first") =~ NodeAddr=([^ ]+) ]]; then
	first=${BASH_REMATCH[1]}
fi
export JAX_COORDINATOR_ADDRESS=$first:$((20000 + SLURM_JOB_ID % 12000))
export LONGHAUL_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')

export PYTHONPATH=/root
export A='b $c'
export NCCL_DEBUG=INFO

tasks=4
srun=(
	srun
	--nodes=4
	--ntasks=4
	--ntasks-per-node=1
	--cpus-per-task=96
	--kill-on-bad-exit=0
	--wait=600
	--export=ALL
	'--container-image=nvcr.io#nvidia/jax:26.01'
	--container-mounts=/here:/here,/runs/base-1b:/runs/base-1b,/root:/root
	--container-workdir=/here
	--container-env=A,JAX_COMPILATION_CACHE_DIR,JAX_COORDINATOR_ADDRESS,LONGHAUL_JOB_SECRET,NCCL_DEBUG,PYTHONPATH
	--mpi=none
)
srun_one=(
	srun
	--nodes=1
	--ntasks=1
	--ntasks-per-node=1
	--export=ALL
	'--container-image=nvcr.io#nvidia/jax:26.01'
	--container-mounts=/here:/here,/runs/base-1b:/runs/base-1b,/root:/root
	--container-workdir=/here
	--container-env=A,JAX_COMPILATION_CACHE_DIR,JAX_COORDINATOR_ADDRESS,LONGHAUL_JOB_SECRET,NCCL_DEBUG,PYTHONPATH
	--mpi=none
)
train=(
	python3
	-P
	-m
	train
	model=gpt_nano
	'run.dir="/runs/base-1b"'
)
status=(
	python3
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
never_again=(130 78 4 65 3 70 5)
again=(42 134 75)
pauses=(10 20 40 80 160 320 600 600 600 600)

