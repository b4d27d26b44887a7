export A='b $c'
export NCCL_DEBUG=INFO
exec trainer ./unpack.py ./code.tar.gz -- trainer -P -m train model=gpt_nano 'run.dir="/runs/base-1b"'