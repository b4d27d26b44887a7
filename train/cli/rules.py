"""Which configs are allowed: the rules between keys.

Types and bounds of each key stand beside it in its dataclass, and hold here already.
Everything here is checked before a device is touched; what depends on the number
of devices is checked where they are counted.
"""

from typing import Any

from data.config import Source
from model.config import LOGICAL_AXES, Position
from train.config import MESH_AXES, Config, OptimizerName, Schedule, TrackerName
from train.errors import Mistake, nearest
from train.identity import differences

NOT_YET = ("context", "expert")


def validate(config: Config) -> list[Mistake]:
    """List every mistake between keys that shows without counting devices."""
    found = [Mistake(f"model.{k}", v, rule) for k, v, rule in config.model.mistakes()]
    found += [Mistake(f"data.{k}", v, rule) for k, v, rule in config.data.mistakes()]
    return [*found, *_alone(config), *_across(config), *_mesh(config)]


def must_name_run(config: Any) -> list[Mistake]:
    """List the mistakes of a command on a run: one that names none."""
    rule = "must name the run to read; set run.dir=runs/<name> or run.name"
    named = config.run.name or config.run.dir
    return [] if named else [Mistake("run.dir", None, rule)]


def _alone(config: Config) -> list[Mistake]:
    """List values that are wrong by themselves, in ways that no bound says."""
    found: list[Mistake] = []
    address, steps = config.distributed.coordinator_address, config.profile.steps
    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdigit()):
        rule = "must be host:port of process 0, say 10.0.0.1:8476, or null"
        found.append(Mistake("distributed.coordinator_address", address, rule))
    if steps and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
        rule = "must be two ascending steps such as [10,12], or []"
        found.append(Mistake("profile.steps", steps, rule))
    return found


def _across(config: Config) -> list[Mistake]:
    """List what does not go together across components."""
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

    check(
        data.batch_size % train.accumulation_steps == 0,
        "data.batch_size",
        data.batch_size,
        f"must be divisible by train.accumulation_steps={train.accumulation_steps}"
        f"; {nearest(data.batch_size, train.accumulation_steps)}",
    )
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
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    rest = [axis for axis, size in sizes.items() if size == -1]
    for axis, size in sizes.items():
        key, factor = f"mesh.{axis}", getattr(mesh.dcn, axis)
        if axis in NOT_YET and size != 1:
            found.append(Mistake(key, size, "must be 1: nothing implements it yet"))
        elif axis in rest[1:]:
            rule = f"only one axis may be -1 (what is left), and mesh.{rest[0]} is"
            found.append(Mistake(key, size, f"{rule}; give this one a number"))
        if size >= 1 and size % factor:
            rule = f"must divide {key}={size}, of which it is the part across hosts"
            found.append(Mistake(f"mesh.dcn.{axis}", factor, rule))
    for table in ("params", "activations"):
        for name, axes in getattr(mesh, table).items():
            key = f"mesh.{table}.{name}"
            if name not in LOGICAL_AXES:
                rule = f"is no logical axis; they are {', '.join(LOGICAL_AXES)}"
                found.append(Mistake(key, axes, rule))
            listed = axes if isinstance(axes, list) else [axes]
            if axes is not None and any(axis not in MESH_AXES for axis in listed):
                rule = f"must be a mesh axis ({', '.join(MESH_AXES)}), a list, or null"
                found.append(Mistake(key, axes, rule))
            elif len(set(listed)) < len(listed):
                found.append(Mistake(key, axes, "must name each mesh axis once"))
    return found


def without_effect(config: Config) -> list[str]:
    """Name changed settings that nothing reads, and a warm-up that never ends."""
    changed = {diff.key for diff in differences(Config(), config)}
    idle: list[tuple[bool, str, str]] = [
        (config.optimizer.name is OptimizerName.adamw, "optimizer.muon_", "adamw"),
        (config.schedule.name is not Schedule.wsd, "schedule.decay_steps", "not wsd"),
        (
            config.schedule.name is Schedule.constant,
            "schedule.final_fraction",
            "constant",
        ),
        (config.model.position is Position.learned, "model.rope_theta", "learned"),
        (config.model.position is Position.learned, "model.rotary_fraction", "learned"),
        (config.tracker.name is TrackerName.none, "tracker.mode", "none"),
        (config.tracker.name is TrackerName.none, "tracker.project", "none"),
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
