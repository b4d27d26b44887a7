"""Warnings about keys that a command line changes without effect."""

from collections.abc import Iterator
from dataclasses import fields

from data.config import Source
from model.choices import Activation, Mlp, Position, Scaling
from model.config import ModelConfig
from model.mixer_catalog import kinds_of
from train.config import BatchRule, Config, Schedule, ScheduleConfig, Transfer
from train.identity import config_differences

_EXPERT_KEYS = (
    *("num_experts", "experts_per_token", "expert_dim", "shared_expert"),
    *("dense_layers", "experts_every", "router", "routed_scaling"),
)

_UNREAD_BY_ADDED_OPTIMIZERS = ("muon_", "b1", "b2", "epsilon")


def _unread_model_keys(model: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether keys have no effect, their common prefix, the reason)."""
    is_learned = model.position is Position.learned
    scaling = model.rope_scaling.kind
    for key in ("rope_theta", "rope_scaling", "rotary_fraction"):
        yield is_learned, f"model.{key}", "model.position is learned"
    is_unscaled = scaling is Scaling.none and not is_learned
    yield is_unscaled, "model.rope_scaling.", "model.rope_scaling.kind is none"
    yield not model.qk_norm, "model.qk_norm_over", "model.qk_norm is false"
    yield from _unread_mixer_keys(model)
    is_unclamped = model.activation is not Activation.clamped_swiglu
    yield is_unclamped, "model.swiglu_", f"model.activation is {model.activation}"
    is_one_group = model.router_groups == 1
    no_shared = model.shared_experts == 0
    yield is_one_group, "model.router_group_best", "model.router_groups is 1"
    yield no_shared, "model.shared_expert_gate", "model.shared_experts is 0"
    for key in _EXPERT_KEYS:
        yield model.mlp is not Mlp.moe, f"model.{key}", f"model.mlp is {model.mlp}"


def _unread_mixer_keys(model: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield the same for keys that only some mixers read."""
    readers = dict[str, list[str]]()
    for mixer, kind in kinds_of(model).items():
        for key in kind.keys:
            readers.setdefault(key, []).append(mixer)
    for key, mixers in readers.items():
        reason = f"all layers are {' or '.join(dict.fromkeys(model.mixers))}"
        if len(mixers) == 1:
            reason = f"no layer is {mixers[0]}"
        yield not {*mixers} & {*model.mixers}, f"model.{key}", reason


def _unread_schedule_keys(schedule: ScheduleConfig) -> Iterator[tuple[bool, str, str]]:
    has_decay = schedule.has_decay
    name = schedule.name
    has_end = has_decay or name is Schedule.cosine
    for is_read, key in (
        (has_decay, "decay_"),
        (has_decay, "earlier_decays"),
        (name is Schedule.power, "power_"),
        (name is Schedule.piecewise, "points"),
        (has_end, "final_fraction"),
    ):
        yield not is_read, f"schedule.{key}", f"schedule.name is {name}"
    if schedule.decay_steps is not None:
        yield True, "schedule.decay_fraction", "schedule.decay_steps is set"
    if schedule.warmup_tokens is not None:
        yield True, "schedule.warmup_steps", "schedule.warmup_tokens is set"


def unread_key_warnings(config: Config) -> list[str]:
    """Return warnings about keys without effect, and a warm-up that never ends."""
    differences = config_differences(config.defaults(), config)
    changed_keys = sorted(diff.key for diff in differences)
    source = config.data.source
    model = config.model
    train = config.train
    optimizer = config.optimizer.name
    no_transfer = config.optimizer.transfer is Transfer.none
    is_one_weight = train.predict_ahead_later_weight is None
    unread = [
        *_unread_model_keys(model),
        *_unread_schedule_keys(config.schedule),
        (
            config.schedule.base_batch_tokens is None
            and not (config.data.batch_schedule or config.data.sequence_schedule),
            "schedule.batch_rule",
            "schedule.base_batch_tokens is null and all batches have one size",
        ),
        (
            config.schedule.batch_rule is BatchRule.none,
            "schedule.base_batch_tokens",
            "schedule.batch_rule is none",
        ),
        (no_transfer, "optimizer.base_width", "optimizer.transfer is none"),
        (no_transfer, "optimizer.base_depth", "optimizer.transfer is none"),
        (config.mesh.pipeline == 1, "mesh.pipeline_repeats", "mesh.pipeline is 1"),
        (config.mesh.pipeline == 1, "train.pipeline_", "mesh.pipeline is 1"),
        (source is Source.python, "data.on_error", f"data.source is {source}"),
        (
            is_one_weight,
            "train.predict_ahead_later_step",
            "train.predict_ahead_later_weight is null",
        ),
        (not model.predict_ahead, "train.predict_ahead_", "model.predict_ahead is 0"),
        (not config.eval.tasks, "eval.task_", "eval.tasks is []"),
    ]
    unread += [
        (True, f"optimizer.{key}", f"optimizer.name is {optimizer}")
        for key in getattr(optimizer, "unread_keys", _UNREAD_BY_ADDED_OPTIMIZERS)
    ]
    for name in (tracker.name for tracker in fields(config.tracker)):
        is_disabled = not getattr(config.tracker, name).enabled
        reason = f"tracker.{name}.enabled is false"
        unread.append((is_disabled, f"tracker.{name}.", reason))
    # These keys have an effect only when a token store is written, or files are sealed.
    reads_files = config.data.reads_token_files
    reads_stores = source in (Source.tokens, Source.mixture)
    unread += [
        (reads_stores and not reads_files, f"data.{key}", f"data.source is {source}")
        for key in ("validation", "tokenizer")
    ]
    unread += [
        (reads_stores or reads_files, f"data.{key}", f"data.source is {source}")
        for key in ("pattern", "on_error")
    ]
    kinds = {source.value, *(s.format.value for s in config.data.sources.values())}
    has_end_tokens = bool(kinds & {Source.nanogpt, Source.llmc})
    reason = "no token files of nanoGPT or llm.c are read"
    unread.append((not has_end_tokens, "data.end_token", reason))
    warnings = [
        f"{key} has no effect: {reason}"
        for is_unread, prefix, reason in unread
        for key in changed_keys
        if is_unread and key.startswith(prefix)
    ]
    if model.mixer_pattern and "model.mixer" in changed_keys:
        warnings.append("model.mixer has no effect: model.mixer_pattern is set")
    for key in ("remat", "offload"):
        if "mlp_gate" in getattr(config.train, key) and not model.gated:
            reason = f"model.activation={model.activation} has no gate"
            warnings.append(f"train.{key}: mlp_gate has no effect, because {reason}")
    steps = config.train.num_steps
    warmup = config.schedule.in_steps(config.data).warmup_steps
    if warmup >= steps:
        warnings.append(
            f"schedule.warmup_steps={warmup} is not below train.num_steps={steps}: the "
            "learning rate never reaches its peak"
        )
    return warnings
