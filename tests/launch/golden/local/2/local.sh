#!/usr/bin/env bash
cd /here
export PYTHONPATH=/root
export A='b $c'
export NCCL_DEBUG=INFO
export LONGHAUL_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 /venv/bin/python -P -m train model=gpt_nano 'run.dir="/runs/base-1b"' &
RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 /venv/bin/python -P -m train model=gpt_nano 'run.dir="/runs/base-1b"' &
wait
