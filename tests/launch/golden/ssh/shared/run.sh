export PYTHONPATH=/root
export A='b $c'
export NCCL_DEBUG=INFO
module load x
cd -- /here
exec trainer -P -m train model=gpt_nano 'run.dir="/runs/base-1b"'