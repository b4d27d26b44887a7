export PYTHONPATH=/root
export A='b c'
module load x
cd -- /here
exec /venv/bin/python -P -m train model=gpt_nano 'run.dir="/runs/base-1b"'