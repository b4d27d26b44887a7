#!/usr/bin/env bash
cd /work
export PYTHONPATH=/code
export NCCL_DEBUG='a $b'
/venv/bin/python -P -m train model=gpt_nano
