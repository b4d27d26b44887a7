"""Which configs are allowed.

Everything here is checked before a device is touched; what depends on the number
of devices is checked where they are counted.
"""

import math

from data.config import Source
from model.config import LOGICAL_AXES, Position
from train.config import (
    CheckpointsConfig,
    Config,
    EvaluateConfig,
    Optimizer,
    SampleConfig,
    Schedule,
    StatusConfig,
    Tracker,
)
from train.errors import Mistake, nearest
from train.identity import differences, flatten

AXES = ("data", "fsdp", "context", "expert", "tensor")
NOT_YET = ("context", "expert")

# key: (holds, rule). Values that are None need no check: null means unset.
_RANGES = {
    "run.rewind_to": (lambda n: n >= 0, "must not be negative; null is not to"),
    "run.lease_interval_s": (lambda x: x > 0, "must be positive"),
    "run.lease_timeout_s": (lambda x: x > 0, "must be positive"),
    "distributed.coordinator_address": (
        lambda s: s.rpartition(":")[0] and s.rpartition(":")[2].isdigit(),
        "must be host:port of process 0, say 10.0.0.1:8476, or null",
    ),
    "distributed.num_processes": (lambda n: n >= 1, "must be at least 1, or null"),
    "distributed.process_id": (lambda n: n >= 0, "must not be negative; null: found"),
    "distributed.init_timeout_s": (lambda n: n >= 1, "must be at least 1"),
    "distributed.heartbeat_timeout_s": (lambda n: n >= 1, "must be at least 1"),
    "distributed.barrier_timeout_s": (lambda n: n >= 1, "must be at least 1"),
    **{
        f"watchdog.{key}": (lambda x: x > 0, "must be positive")
        for key in (
            *("init_timeout_s", "compile_timeout_s", "restore_timeout_s"),
            *("step_timeout_s", "step_timeout_factor"),
            *("eval_timeout_s", "save_timeout_s"),
        )
    },
    "search_compiles": (lambda n: n >= 0, "must not be negative; 0 compiles none"),
    "search_minutes": (lambda x: x > 0, "must be positive"),
    "runtime.cpu_devices": (lambda n: n >= 1, "must be at least 1, or null"),
    "optimizer.learning_rate": (lambda x: 0 < x < math.inf, "must be positive"),
    "optimizer.weight_decay": (lambda x: 0 <= x < math.inf, "must not be negative"),
    "optimizer.b1": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    "optimizer.b2": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    "optimizer.epsilon": (lambda x: x > 0, "must be positive"),
    "optimizer.clip_norm": (lambda x: x > 0, "must be positive, or null for none"),
    "optimizer.ema_decay": (lambda x: 0 < x < 1, "must lie in (0, 1), or null"),
    "optimizer.muon_learning_rate": (lambda x: 0 < x < math.inf, "must be positive"),
    "optimizer.muon_momentum": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    "optimizer.muon_weight_decay": (lambda x: x >= 0, "must not be negative"),
    "schedule.warmup_steps": (lambda n: n >= 0, "must not be negative"),
    "schedule.decay_steps": (lambda n: n >= 1, "must be at least 1, or null"),
    "schedule.final_fraction": (lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
    "train.num_steps": (lambda n: n >= 1, "must be at least 1"),
    "train.accumulation_steps": (lambda n: n >= 1, "must be at least 1"),
    "train.max_skipped_steps": (lambda n: n >= 0, "must not be negative"),
    "train.skip_sigma": (lambda x: x > 0, "must be positive, or null for never"),
    "train.skip_window": (lambda n: n >= 4, "must be at least 4"),
    "train.replica_check_interval_steps": (
        lambda n: n >= 1,
        "must be at least 1, or null for never",
    ),
    "train.loss_chunk_tokens": (lambda n: n >= 1, "must be at least 1, or null"),
    "train.z_loss": (lambda x: 0 <= x < math.inf, "must not be negative"),
    "eval.interval_steps": (lambda n: n >= 1, "must be at least 1"),
    "eval.num_batches": (
        lambda n: n == -1 or n >= 1,
        "must be at least 1, or -1 for the whole validation split",
    ),
    "eval.final_num_batches": (
        lambda n: n == -1 or n >= 1,
        "must be at least 1, or -1 for the whole validation split",
    ),
    "log.interval_steps": (lambda n: n >= 1, "must be at least 1"),
    "checkpoint.save_interval_steps": (lambda n: n >= 1, "must be at least 1"),
    "checkpoint.save_interval_minutes": (lambda x: x > 0, "must be positive"),
    "checkpoint.keep_latest": (lambda n: n >= 1, "must be at least 1"),
    "checkpoint.keep_every_steps": (lambda n: n >= 1, "must be at least 1, or null"),
    "checkpoint.max_failed_saves": (lambda n: n >= 0, "must not be negative"),
    "tracker.mode": (lambda s: s in ("offline", "online"), "must be offline or online"),
    "profile.steps": (
        lambda s: not s or (len(s) == 2 and 0 <= s[0] < s[1]),
        "must be two ascending steps such as [10,12], or []",
    ),
    # Of train.plan.
    "margin": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    # Of train.evaluate and train.sample.
    "step": (lambda n: n >= 0, "must not be negative; null is the newest"),
    "num_batches": (
        lambda n: n == -1 or n >= 1,
        "must be at least 1, or -1 for the whole validation split",
    ),
    "batch_size": (lambda n: n >= 1, "must be at least 1, or null for the run's"),
    "num_tokens": (lambda n: n >= 1, "must be at least 1"),
    "temperature": (lambda x: 0 <= x < math.inf, "must not be negative"),
    "top_k": (lambda n: n >= 1, "must be at least 1, or null for all tokens"),
    "top_p": (lambda x: 0 < x <= 1, "must lie in (0, 1], or null"),
    "num_samples": (lambda n: n >= 1, "must be at least 1"),
}


def validate(
    config: Config | EvaluateConfig | SampleConfig | CheckpointsConfig | StatusConfig,
) -> list[Mistake]:
    """List every mistake that shows without counting devices."""
    values = flatten(config)
    found = [
        Mistake(key, values[key], rule)
        for key, (holds, rule) in _RANGES.items()
        if values.get(key) is not None and not holds(values[key])
    ]
    if not isinstance(config, Config):
        if not (config.run.name or config.run.dir):
            rule = "must name the run to read; set run.dir=runs/<name> or run.name"
            found.append(Mistake("run.dir", None, rule))
        return found
    found += [Mistake(f"model.{k}", v, rule) for k, v, rule in config.model.mistakes()]
    found += [Mistake(f"data.{k}", v, rule) for k, v, rule in config.data.mistakes()]
    found += _across(config, {mistake.key for mistake in found})
    found += _mesh(config)
    return found


def _across(config: Config, wrong: set[str]) -> list[Mistake]:
    """Rules between components, each only where its own keys are right."""
    found: list[Mistake] = []
    model, data, train, schedule = (
        config.model,
        config.data,
        config.train,
        config.schedule,
    )

    def check(ok: bool, key: str, value: object, rule: str) -> None:
        if not ok:
            found.append(Mistake(key, value, rule))

    if not wrong & {"data.batch_size", "train.accumulation_steps"}:
        check(
            data.batch_size % train.accumulation_steps == 0,
            "data.batch_size",
            data.batch_size,
            f"must be divisible by train.accumulation_steps={train.accumulation_steps}"
            f"; {nearest(data.batch_size, train.accumulation_steps)}",
        )
    if not wrong & {"run.lease_interval_s", "run.lease_timeout_s"}:
        check(
            config.run.lease_timeout_s >= 4 * config.run.lease_interval_s,
            "run.lease_timeout_s",
            config.run.lease_timeout_s,
            f"must be at least 4 times run.lease_interval_s="
            f"{config.run.lease_interval_s}, or a busy owner passes for dead",
        )
    if model.position is Position.learned and model.max_sequence_length is not None:
        check(
            data.sequence_length <= model.max_sequence_length,
            "data.sequence_length",
            data.sequence_length,
            "must be at most model.max_sequence_length="
            f"{model.max_sequence_length} with learned positions; lower it, raise that,"
            " or choose model.position=rotary",
        )
    if not wrong & {"schedule.warmup_steps", "train.num_steps"}:
        decay = schedule.decay_steps
        check(
            schedule.name is not Schedule.wsd
            or decay is None
            or schedule.warmup_steps + decay <= train.num_steps,
            "schedule.decay_steps",
            decay,
            f"must leave room for schedule.warmup_steps={schedule.warmup_steps} within "
            f"train.num_steps={train.num_steps}; lower it, or null for 30 %",
        )
    return found


def _mesh(config: Config) -> list[Mistake]:
    """Sizes of the axes, their factors across hosts, and the two rule tables."""
    mesh = config.mesh
    found: list[Mistake] = []
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    rest = [axis for axis, size in sizes.items() if size == -1]
    for axis, size in sizes.items():
        key, factor = f"mesh.{axis}", getattr(mesh.dcn, axis)
        if size < 1 and size != -1:
            found.append(Mistake(key, size, "must be at least 1, or -1: what is left"))
        elif axis in NOT_YET and size != 1:
            found.append(Mistake(key, size, "must be 1: nothing implements it yet"))
        elif axis in rest[1:]:
            rule = f"only one axis may be -1 (what is left), and mesh.{rest[0]} is"
            found.append(Mistake(key, size, f"{rule}; give this one a number"))
        if factor < 1:
            found.append(Mistake(f"mesh.dcn.{axis}", factor, "must be at least 1"))
        elif size >= 1 and size % factor:
            rule = f"must divide {key}={size}, of which it is the part across hosts"
            found.append(Mistake(f"mesh.dcn.{axis}", factor, rule))
    for table in ("params", "activations"):
        for name, axes in getattr(mesh, table).items():
            key = f"mesh.{table}.{name}"
            if name not in LOGICAL_AXES:
                rule = f"is no logical axis; they are {', '.join(LOGICAL_AXES)}"
                found.append(Mistake(key, axes, rule))
            listed = axes if isinstance(axes, list) else [axes]
            if axes is not None and any(axis not in AXES for axis in listed):
                rule = f"must be a mesh axis ({', '.join(AXES)}), a list, or null"
                found.append(Mistake(key, axes, rule))
            elif len(set(listed)) < len(listed):
                found.append(Mistake(key, axes, "must name each mesh axis once"))
    return found


def without_effect(config: Config) -> list[str]:
    """Name changed settings that nothing reads, and a warm-up that never ends."""
    changed = {diff.key for diff in differences(Config(), config)}
    idle: list[tuple[bool, str, str]] = [
        (config.optimizer.name is Optimizer.adamw, "optimizer.muon_", "adamw"),
        (config.schedule.name is not Schedule.wsd, "schedule.decay_steps", "not wsd"),
        (
            config.schedule.name is Schedule.constant,
            "schedule.final_fraction",
            "constant",
        ),
        (config.model.position is Position.learned, "model.rope_theta", "learned"),
        (config.model.position is Position.learned, "model.rotary_fraction", "learned"),
        (config.tracker.name is Tracker.none, "tracker.mode", "none"),
        (config.tracker.name is Tracker.none, "tracker.project", "none"),
    ]
    if config.data.source in (Source.tokens, Source.mixture):
        own = ("validation", "tokenizer", "tokenizer_sha256", "pattern")
        idle += [(True, f"data.{key}", config.data.source) for key in own]
    steps, warmup = config.train.num_steps, config.schedule.warmup_steps
    short = [
        f"schedule.warmup_steps={warmup} is not below train.num_steps={steps}: the "
        "learning rate never reaches its peak"
    ]
    group = {
        "model": "model.position",
        "optimizer": "optimizer.name",
        "data": "data.source",
    }
    return [
        f"{key} has no effect: "
        f"{group.get(prefix.split('.')[0], prefix.split('.')[0] + '.name')} is {why}"
        for unused, prefix, why in idle
        if unused
        for key in sorted(changed)
        if key.startswith(prefix)
    ] + (short if warmup >= steps else [])
