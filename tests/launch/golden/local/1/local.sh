#!/usr/bin/env bash
cd /here
export PYTHONPATH=/root
export A='b $c'
export NCCL_DEBUG=INFO
/venv/bin/python -P -m train model=gpt_nano 'run.dir="/runs/base-1b"'
