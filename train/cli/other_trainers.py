"""Translate names of settings of nanoGPT, MaxText and torchtitan to keys of Longhaul.

`docs/guides/switching.md` shows the same translations in a table.
"""

from collections.abc import Collection

# A name that several trainers share is listed once.
NAMES = {
    # nanoGPT
    "block_size": "data.sequence_length",
    "gradient_accumulation_steps": "train.accumulation_steps",
    "max_iters": "train.num_steps",
    "min_lr": "schedule.final_fraction, which is min_lr / learning_rate",
    "warmup_iters": "schedule.warmup_steps",
    "dtype": "model.compute_dtype",
    "out_dir": "run.dir",
    "eval_interval": "eval.interval_steps",
    "eval_iters": "eval.num_batches",
    # MaxText
    "per_device_batch_size": "data.batch_size, which counts rows over all devices",
    "max_target_length": "data.sequence_length",
    "steps": "train.num_steps",
    "learning_rate_final_fraction": "schedule.final_fraction",
    "warmup_steps_fraction": "schedule.warmup_steps, which counts steps",
    "ici_data_parallelism": "mesh.data",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "ici_tensor_parallelism": "mesh.tensor",
    "ici_context_parallelism": "mesh.context",
    "ici_expert_parallelism": "mesh.expert",
    "ici_pipeline_parallelism": "mesh.pipeline",
    "dcn_data_parallelism": "mesh.dcn.data",
    "dcn_fsdp_parallelism": "mesh.dcn.fsdp",
    "remat_policy": "train.remat",
    "base_output_directory": "run.dir",
    "run_name": "run.name",
    "eval_steps": "eval.num_batches",
    "checkpoint_period": "checkpoint.save_interval_steps",
    # torchtitan
    "global_batch_size": "data.batch_size",
    "local_batch_size": "data.batch_size, which counts rows over all devices",
    "seq_len": "data.sequence_length",
    "lr": "optimizer.learning_rate",
    "lr_min": "schedule.final_fraction, a fraction of optimizer.learning_rate",
    "mixed_precision_param": "model.compute_dtype",
    "data_parallel_shard_degree": "mesh.fsdp",
    "data_parallel_replicate_degree": "mesh.data",
    "tensor_parallel_degree": "mesh.tensor",
    "context_parallel_degree": "mesh.context",
    "expert_parallel_degree": "mesh.expert",
    "pipeline_parallel_degree": "mesh.pipeline",
    "dump_folder": "run.dir",
}


def translate(key: str, known_keys: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return a sentence about another trainer's key, and the keys that replace it.

    The sentence is empty if no trainer has the key, or if its translation is not in
    `known_keys`. Only the last part of the key is compared.
    """
    name = key.rpartition(".")[2]
    if name == "resume":
        return "the same command continues a run", ()
    translation = NAMES.get(name, "")
    translated = translation.partition(",")[0]
    if translated not in known_keys:
        return "", ()
    return f"it is called {translation} here", (translated,)
