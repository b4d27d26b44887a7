"""Translate settings of nanoGPT, MaxText, torchtitan and HF Trainer to our keys.

`docs/guides/switching.md` shows this table; a test keeps both equal.
"""

from collections.abc import Collection
from typing import NamedTuple


class Setting(NamedTuple):
    """A setting of Longhaul, and its names in other trainers.

    keys: the keys, with spaces between; empty if something else replaces the setting.
    note: what to know, as the end of a sentence; in Markdown.
    nanogpt, maxtext, torchtitan, hf: names, with spaces between. HF is Hugging Face's
        TrainingArguments, and the config.json of its models.
    """

    keys: str
    note: str = ""
    nanogpt: str = ""
    maxtext: str = ""
    torchtitan: str = ""
    hf: str = ""


_ALL_DEVICES = "rows of one update, over all devices"
_FRACTION = "a fraction of `optimizer.learning_rate`"
_SAME_COMMAND = "the same command continues a run"
SETTINGS = (
    Setting(
        "data.batch_size",
        _ALL_DEVICES,
        nanogpt="batch_size",
        maxtext="per_device_batch_size",
        torchtitan="training.global_batch_size training.local_batch_size",
        hf="per_device_train_batch_size",
    ),
    Setting(
        "train.accumulation_steps",
        "microbatches of one update",
        nanogpt="gradient_accumulation_steps",
        maxtext="gradient_accumulation_steps",
        hf="gradient_accumulation_steps",
    ),
    Setting(
        "data.sequence_length",
        nanogpt="block_size",
        maxtext="max_target_length",
        torchtitan="training.seq_len",
        hf="max_seq_length max_length",
    ),
    Setting(
        "train.num_steps",
        nanogpt="max_iters",
        maxtext="steps",
        torchtitan="training.steps",
        hf="max_steps",
    ),
    Setting(
        "train.num_steps",
        "which counts updates; a run prints how often it uses its data",
        hf="num_train_epochs",
    ),
    Setting(
        "optimizer.learning_rate",
        nanogpt="learning_rate",
        maxtext="learning_rate",
        torchtitan="optimizer.lr",
        hf="learning_rate",
    ),
    Setting(
        "schedule.final_fraction",
        _FRACTION,
        nanogpt="min_lr",
        maxtext="learning_rate_final_fraction",
        torchtitan="lr_scheduler.lr_min lr_scheduler.min_lr_factor",
    ),
    Setting(
        "schedule.warmup_steps",
        "which counts steps",
        nanogpt="warmup_iters",
        maxtext="warmup_steps_fraction",
        torchtitan="lr_scheduler.warmup_steps",
        hf="warmup_steps warmup_ratio",
    ),
    Setting(
        "schedule.name",
        "chosen by `schedule=cosine`, `linear`, `wsd`, ...",
        nanogpt="decay_lr",
        maxtext="lr_schedule_type",
        torchtitan="lr_scheduler.decay_type",
        hf="lr_scheduler_type",
    ),
    Setting(
        "schedule.decay_fraction",
        torchtitan="lr_scheduler.decay_ratio",
    ),
    Setting(
        "optimizer.name",
        "chosen by `optimizer=adamw`, `muon`, ...",
        maxtext="opt_type",
        hf="optim",
    ),
    Setting(
        "optimizer.weight_decay",
        nanogpt="weight_decay",
        maxtext="adam_weight_decay",
        torchtitan="optimizer.weight_decay",
        hf="weight_decay",
    ),
    Setting(
        "optimizer.b1",
        nanogpt="beta1",
        maxtext="adam_b1",
        torchtitan="optimizer.beta1",
        hf="adam_beta1",
    ),
    Setting(
        "optimizer.b2",
        nanogpt="beta2",
        maxtext="adam_b2",
        torchtitan="optimizer.beta2",
        hf="adam_beta2",
    ),
    Setting(
        "optimizer.epsilon",
        maxtext="adam_eps",
        torchtitan="optimizer.eps",
        hf="adam_epsilon",
    ),
    Setting(
        "optimizer.clip_norm",
        nanogpt="grad_clip",
        maxtext="gradient_clipping_threshold",
        torchtitan="training.max_norm",
        hf="max_grad_norm",
    ),
    Setting(
        "model.compute_dtype",
        nanogpt="dtype",
        maxtext="dtype",
        torchtitan="training.mixed_precision_param",
        hf="bf16 fp16 torch_dtype",
    ),
    Setting("model.param_dtype", maxtext="weight_dtype", torchtitan="training.dtype"),
    Setting("seed", nanogpt="seed", torchtitan="training.seed debug.seed", hf="seed"),
    Setting(
        "model.name",
        "chosen by `model=<preset>`",
        maxtext="model_name",
        torchtitan="model.flavor",
        hf="model_name_or_path",
    ),
    Setting(
        "model.num_layers",
        nanogpt="n_layer",
        maxtext="base_num_decoder_layers",
        hf="num_hidden_layers",
    ),
    Setting(
        "model.num_heads",
        nanogpt="n_head",
        maxtext="base_num_query_heads",
        hf="num_attention_heads",
    ),
    Setting(
        "model.num_kv_heads", maxtext="base_num_kv_heads", hf="num_key_value_heads"
    ),
    Setting(
        "model.embed_dim", nanogpt="n_embd", maxtext="base_emb_dim", hf="hidden_size"
    ),
    Setting("model.mlp_dim", maxtext="base_mlp_dim", hf="intermediate_size"),
    Setting(
        "model.max_sequence_length",
        hf="max_position_embeddings",
    ),
    Setting("model.activation", maxtext="mlp_activations", hf="hidden_act"),
    Setting(
        "model.norm_epsilon",
        maxtext="normalization_layer_epsilon",
        hf="rms_norm_eps layer_norm_eps layer_norm_epsilon",
    ),
    Setting(
        "model.tied_head", maxtext="logits_via_embedding", hf="tie_word_embeddings"
    ),
    Setting(
        "model.dropout.residual",
        "and `model.dropout.attention`, `model.dropout.embedding`",
        nanogpt="dropout",
        maxtext="dropout_rate",
        hf="resid_pdrop",
    ),
    Setting(
        "mesh.fsdp",
        maxtext="ici_fsdp_parallelism",
        torchtitan="parallelism.data_parallel_shard_degree",
        hf="fsdp",
    ),
    Setting(
        "mesh.data",
        "replicas",
        maxtext="ici_data_parallelism",
        torchtitan="parallelism.data_parallel_replicate_degree",
    ),
    Setting(
        "mesh.tensor",
        maxtext="ici_tensor_parallelism",
        torchtitan="parallelism.tensor_parallel_degree",
    ),
    Setting(
        "mesh.context",
        maxtext="ici_context_parallelism",
        torchtitan="parallelism.context_parallel_degree",
    ),
    Setting(
        "mesh.expert",
        maxtext="ici_expert_parallelism",
        torchtitan="parallelism.expert_parallel_degree",
    ),
    Setting(
        "mesh.pipeline",
        maxtext="ici_pipeline_parallelism",
        torchtitan="parallelism.pipeline_parallel_degree",
    ),
    Setting("mesh.dcn.data", maxtext="dcn_data_parallelism"),
    Setting("mesh.dcn.fsdp", maxtext="dcn_fsdp_parallelism"),
    Setting("mesh.dcn.pipeline", maxtext="dcn_pipeline_parallelism"),
    Setting(
        "train.remat",
        maxtext="remat_policy",
        torchtitan="activation_checkpoint.mode",
        hf="gradient_checkpointing",
    ),
    Setting(
        "run.dir",
        "or `run.name` under `runs/`",
        nanogpt="out_dir",
        maxtext="base_output_directory",
        torchtitan="job.dump_folder",
        hf="output_dir",
    ),
    Setting("run.name", maxtext="run_name", hf="run_name"),
    Setting(
        "",
        _SAME_COMMAND,
        nanogpt="resume init_from=resume",
        torchtitan="checkpoint.load_step",
        hf="resume_from_checkpoint",
    ),
    Setting(
        "eval.interval_steps",
        nanogpt="eval_interval",
        maxtext="eval_interval",
        torchtitan="validation.freq",
        hf="eval_steps",
    ),
    Setting(
        "eval.num_batches",
        nanogpt="eval_iters",
        maxtext="eval_steps",
        torchtitan="validation.steps",
    ),
    Setting(
        "log.interval_steps",
        nanogpt="log_interval",
        maxtext="log_period",
        torchtitan="metrics.log_freq",
        hf="logging_steps",
    ),
    Setting(
        "checkpoint.save_interval_steps",
        "and `checkpoint.save_interval_minutes`",
        maxtext="checkpoint_period",
        torchtitan="checkpoint.interval",
        hf="save_steps",
    ),
    Setting(
        "checkpoint.keep_latest",
        maxtext="max_num_checkpoints_to_keep",
        torchtitan="checkpoint.keep_latest_k",
        hf="save_total_limit",
    ),
    Setting(
        "tracker.wandb.enabled",
        "chosen by `tracker=wandb`, `tensorboard`, ...",
        nanogpt="wandb_log",
        torchtitan="metrics.enable_wandb",
        hf="report_to",
    ),
    Setting(
        "tracker.wandb.project",
        nanogpt="wandb_project",
    ),
    Setting(
        "data.path",
        "a folder of text, or with `data=tokens` a store of `data.prepare`",
        nanogpt="dataset",
        maxtext="dataset_path hf_path",
        torchtitan="training.dataset training.dataset_path",
        hf="dataset_name train_file",
    ),
    Setting(
        "data.tokenizer",
        maxtext="tokenizer_path",
        torchtitan="model.tokenizer_path model.hf_assets_path",
        hf="tokenizer_name",
    ),
    Setting("data.prefetch", hf="dataloader_num_workers"),
)
TRAINERS = ("nanogpt", "maxtext", "torchtitan", "hf")
# Sections in which others keep settings of all kinds.
_NEUTRAL = ("", "args", "config", "train", "trainer", "training", "training_args")


def translate(key: str, known_keys: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return a sentence about another trainer's key, and the keys that replace it.

    The sentence is empty if no trainer has the key, or if its translation is not in
    `known_keys`. A section is ignored if the rest of the name has several words, or if
    the section says nothing.
    """
    section, _, name = key.rpartition(".")
    settings = _settings_named(key)
    if not settings and ("_" in name or section in _NEUTRAL):
        settings = _settings_named(name)
    known = [s for s in settings if not s.keys or s.keys in known_keys]
    if not known:
        return "", ()
    if not known[0].keys:
        return known[0].note.replace("`", ""), ()
    texts = (f"{s.keys} here" + (f" ({s.note})" if s.note else "") for s in known)
    sentence = f"it is called {', or '.join(texts)}".replace("`", "")
    return sentence, tuple(s.keys for s in known)


def _settings_named(key: str) -> list[Setting]:
    """Return the settings that a trainer calls `key`, or `<section>.key`."""
    exact = list[Setting]()
    last = list[Setting]()
    for setting in SETTINGS:
        names = " ".join(getattr(setting, trainer) for trainer in TRAINERS).split()
        if key in names:
            exact.append(setting)
        elif "_" in key and key in (name.rpartition(".")[2] for name in names):
            last.append(setting)
    return exact or last
