export JAX_COMPILATION_CACHE_DIR=gs://bucket/runs/base-1b/compilation_cache
export A='b $c'
export NCCL_DEBUG=INFO
WANDB_API_KEY="$(gcloud secrets versions access latest --secret=wandb --project=my-project)"
export WANDB_API_KEY
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --allow-existing --python 3.13 ~/longhaul/venv
tar --extract --gzip --file code.tar.gz constraints.txt
python3 -m uv pip install --quiet --python ~/longhaul/venv/bin/python --constraint constraints.txt "longhaul[tpu,gcs] @ file://$PWD/code.tar.gz"
source ~/longhaul/venv/bin/activate
exec python3 ./unpack.py ./code.tar.gz -- python3 -P -m train model=gpt_nano 'run.dir="gs://bucket/runs/base-1b"'