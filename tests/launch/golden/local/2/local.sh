#!/usr/bin/env bash
cd /work
export PYTHONPATH=/code
export NCCL_DEBUG='a $b'
RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 /venv/bin/python -P -m train model=gpt_nano &
RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 /venv/bin/python -P -m train model=gpt_nano &
wait
