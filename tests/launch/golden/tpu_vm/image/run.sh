export JAX_COMPILATION_CACHE_DIR=gs://bucket/runs/base-1b/compilation_cache
export A='b $c'
export NCCL_DEBUG=INFO
WANDB_API_KEY="$(gcloud secrets versions access latest --secret=wandb --project=my-project)"
export WANDB_API_KEY
sudo docker rm --force base-1b-12345678 >/dev/null 2>&1 || true
exec sudo --preserve-env=JAX_COMPILATION_CACHE_DIR,A,NCCL_DEBUG,WANDB_API_KEY docker run --rm --name=base-1b-12345678 --privileged --net=host --user=root --env=JAX_COMPILATION_CACHE_DIR --env=A --env=NCCL_DEBUG --env=WANDB_API_KEY a/b:c python -P -m train model=gpt_nano 'run.dir="gs://bucket/runs/base-1b"'