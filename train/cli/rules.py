"""The rules between keys.

The types and bounds of the values have already been checked. The rules here are checked
before any device is used; rules on the number of devices are checked after the devices
have been counted. Each mistake names the keys that its rule reads (`related`), and is
not reported if one of these keys is itself wrong.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from data.config import DataConfig
from data.config_rules import data_mistakes
from data.errors import Mistake
from model.choices import Mlp, Position
from model.config import LOGICAL_AXES, ModelConfig
from model.config_rules import model_mistakes
from model.mixer_catalog import kinds_of
from train.cli.optimizer_rules import qk_clip_mistakes, transfer_mistakes
from train.config import (
    MESH_AXES,
    Config,
    DistributedConfig,
    EvalSet,
    MeshConfig,
    OptimizerConfig,
    OptimizerName,
    Remat,
    RunConfig,
    Schedule,
    ScheduleConfig,
    TraceConfig,
    TrackerConfig,
    TrainConfig,
)
from train.core.shards import listed
from train.errors import nearest

_SCORES = ("loss", "bits_per_byte")  # names that metrics.jsonl uses for scores
# For each rule table, the logical axis that no array of the table has.
_UNUSED_AXIS = {"params": "batch", "activations": "layers"}
# An activation may have both dims of a pair. One mesh axis cannot shard both.
_FEATURE_DIMS = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp")
_DIM_PAIRS = (
    *product(_FEATURE_DIMS, ("batch", "seq")),
    *product(["head_dim"], ("heads", "kv_heads")),
)


def config_mistakes(config: Config) -> list[Mistake]:
    """Return all mistakes between keys that do not depend on the devices."""
    num_steps = config.train.num_steps
    return [
        *model_mistakes(config.model, kinds_of(config.model)),
        *data_mistakes(config.data),
        *_distributed_mistakes(config.distributed),
        *_trace_mistakes(config.profile),
        *_microbatch_mistakes(config.data, config.train),
        *_run_mistakes(config.run, config.tracker),
        *_row_mistakes(config.data, config.model),
        *_point_mistakes(config.schedule),
        *_schedule_mistakes(config.schedule.in_steps(config.data), num_steps),
        *_axis_size_mistakes(config.mesh),
        *_rule_table_mistakes(config.mesh),
        *_expert_mistakes(config.mesh, config.model),
        *_pipeline_mistakes(config.mesh),
        *_offload_mistakes(config.train, config.optimizer, mesh=config.mesh),
        *qk_clip_mistakes(config.optimizer, model=config.model, data=config.data),
        *transfer_mistakes(
            config.optimizer, schedule=config.schedule, num_steps=num_steps
        ),
        *eval_set_mistakes(config.eval.sets, config.data, "eval.sets"),
    ]


def must_name_run(config: Any) -> list[Mistake]:
    """Return a mistake if the config names no run, for commands that read a run."""
    if config.run.name or config.run.dir:
        return []
    rule = "must name the run to read; set run.dir=runs/<name> or run.name"
    return [Mistake("run.dir", None, rule)]


def _distributed_mistakes(distributed: DistributedConfig) -> Iterator[Mistake]:
    address = distributed.coordinator_address
    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdigit()):
        rule = "must be host:port of process 0, say 10.0.0.1:8476, or null"
        yield Mistake("distributed.coordinator_address", address, rule)


def _trace_mistakes(profile: TraceConfig) -> Iterator[Mistake]:
    steps = profile.steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] < steps[1]):
        rule = "must be two ascending steps from 1 on such as [10,12], or []"
        yield Mistake("profile.steps", steps, rule)


def _microbatch_mistakes(data: DataConfig, train: TrainConfig) -> Iterator[Mistake]:
    accumulation = train.accumulation_steps
    if data.batch_size % accumulation:
        rule = f"must be divisible by train.accumulation_steps={accumulation}; "
        rule += nearest(data.batch_size, accumulation)
        related = ("train.accumulation_steps",)
        yield Mistake("data.batch_size", data.batch_size, rule, related)


def _run_mistakes(run: RunConfig, tracker: TrackerConfig) -> Iterator[Mistake]:
    """Yield mistakes in the lease of a run, and in where its trackers write."""
    if run.lease_timeout_s < 4 * run.lease_interval_s:
        rule = f"must be at least 4 times run.lease_interval_s={run.lease_interval_s}, "
        rule += "or a busy owner is taken for dead"
        related = ("run.lease_interval_s",)
        yield Mistake("run.lease_timeout_s", run.lease_timeout_s, rule, related)
    server_uri = tracker.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if tracker.mlflow.enabled and not server_uri and "://" in (run.dir or ""):
        rule = f"must name a server: MLflow keeps no files under run.dir={run.dir}"
        yield Mistake("tracker.mlflow.uri", None, rule, ("run.dir",))


def _row_mistakes(data: DataConfig, model: ModelConfig) -> Iterator[Mistake]:
    """Yield mistakes in the length of rows that a model reads."""
    is_learned = model.position is Position.learned
    limit = model.max_sequence_length
    if is_learned and limit is not None and data.sequence_length > limit:
        rule = f"must be at most model.max_sequence_length={limit} with learned "
        rule += "positions; lower it, raise the limit, or choose model.position=rotary"
        related = ("model.max_sequence_length", "model.position")
        yield Mistake("data.sequence_length", data.sequence_length, rule, related)
    if data.sequence_length <= model.predict_ahead:
        rule = f"must be longer than model.predict_ahead={model.predict_ahead}: no row "
        rule += "would have a token so far ahead"
        related = ("model.predict_ahead",)
        yield Mistake("data.sequence_length", data.sequence_length, rule, related)


def _point_mistakes(schedule: ScheduleConfig) -> Iterator[Mistake]:
    for i, point in enumerate(schedule.points):
        if [point.step, point.tokens, point.fraction].count(None) != 2:
            rule = "must have either a step, a number of tokens, or a fraction"
            yield Mistake(f"schedule.points[{i}]", asdict(point), rule)


def _schedule_mistakes(schedule: ScheduleConfig, num_steps: int) -> Iterator[Mistake]:
    warmup = schedule.warmup_steps
    decay = schedule.decay_steps
    if schedule.has_decay and decay and warmup + decay > num_steps:
        rule = f"must leave room for schedule.warmup_steps={warmup} within "
        rule += f"train.num_steps={num_steps}; lower schedule.warmup_steps or this one "
        rule += "(null: schedule.decay_fraction of the steps)"
        related = ("schedule.warmup_steps", "train.num_steps")
        yield Mistake("schedule.decay_steps", decay, rule, related)
    ends = schedule.earlier_decays
    if sorted({warmup, *ends}) != [warmup, *ends]:
        rule = f"must be ascending steps after schedule.warmup_steps={warmup}"
        related = ("schedule.warmup_steps",)
        yield Mistake("schedule.earlier_decays", ends, rule, related)
    if schedule.name is not Schedule.piecewise:
        return
    steps = [step for step, _ in schedule.piecewise_points(num_steps)]
    if not steps or sorted(set(steps)) != steps:
        rule = "must be one point or more, at ascending steps; say "
        rule += "[{step: 0, factor: 1}, {fraction: 1, factor: 0}]"
        yield Mistake("schedule.points", steps, rule, ("train.num_steps",))


def eval_set_mistakes(
    sets: Mapping[str, EvalSet], data: DataConfig, table: str
) -> Iterator[Mistake]:
    """Yield mistakes in validation sets: an invalid or duplicate name, or no path."""
    for name, validation_set in sets.items():
        if not re.fullmatch(r"[\w-]+", name) or name in _SCORES:
            rule = "must have a name of letters, digits, _ and -, and not "
            rule += " or ".join(_SCORES)
            yield Mistake(f"{table}.{name}", validation_set.path, rule)
        if name in data.sources:
            rule = "is also the name of a source in data.sources; give it another name"
            yield Mistake(f"{table}.{name}", validation_set.path, rule)
        if not validation_set.path:
            rule = "must name a token store, or text if data.path is text"
            yield Mistake(f"{table}.{name}.path", validation_set.path, rule)


def _axis_size_mistakes(mesh: MeshConfig) -> Iterator[Mistake]:
    """Yield mistakes in the axis sizes, and in the factors of `mesh.dcn`."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    inferred_axes = [axis for axis, size in sizes.items() if size == -1]
    for axis in inferred_axes[1:]:
        rule = "must be a number, because only one axis may be -1 (the remaining "
        rule += f"devices), and mesh.{inferred_axes[0]} is"
        yield Mistake(f"mesh.{axis}", -1, rule, (f"mesh.{inferred_axes[0]}",))
    for axis, size in sizes.items():
        key = f"mesh.{axis}"
        factor = getattr(mesh.dcn, axis)
        if size >= 1 and size % factor:
            rule = f"must divide {key}={size}: it is the factor across slices or hosts"
            yield Mistake(f"mesh.dcn.{axis}", factor, rule, (key,))


def _rule_table_mistakes(mesh: MeshConfig) -> Iterator[Mistake]:
    """Yield mistakes in the two rule tables, and logical axes without a rule."""
    # A missing rule is reported below.
    sequence = mesh.activations.get("seq", "context")
    if sequence != "context" and (sequence is not None or mesh.context != 1):
        rule = "must be context, which divides rows; or null with mesh.context=1"
        yield Mistake("mesh.activations.seq", sequence, rule, ("mesh.context",))
    batch_axes = mesh.activations.get("batch")
    if "context" in listed(batch_axes):
        rule = "must not name context, along which devices share rows; leave it out"
        yield Mistake("mesh.activations.batch", batch_axes, rule)
    for table, unused_axis in _UNUSED_AXIS.items():
        entries = getattr(mesh, table)
        for name in LOGICAL_AXES:
            if name not in entries and name != unused_axis:
                rule = "is missing, and every logical axis needs a rule; give a mesh "
                rule += "axis, a list, or null (replicated): configs/mesh/rules.yaml"
                yield Mistake(f"mesh.{table}.{name}", "", rule)
        for name, axes in entries.items():
            yield from _rule_mistakes(f"mesh.{table}.{name}", name, axes)
    for name, other_name in _DIM_PAIRS:
        axes, other_axes = (mesh.activations.get(n) for n in (name, other_name))
        if shared := [axis for axis in listed(axes) if axis in listed(other_axes)]:
            rule = f"must not name {shared[0]}, as mesh.activations.{other_name} does: "
            rule += "both are dims of one array; take another mesh axis, or null"
            yield Mistake(f"mesh.activations.{name}", axes, rule)


def _rule_mistakes(key: str, name: str, axes: Any) -> Iterator[Mistake]:
    """Yield mistakes in one entry of a rule table."""
    if name not in LOGICAL_AXES:
        rule = f"is no logical axis; they are {', '.join(LOGICAL_AXES)}"
        yield Mistake(key, axes, rule)
    if any(axis not in MESH_AXES for axis in listed(axes)):
        rule = f"must be a mesh axis ({', '.join(MESH_AXES)}), a list, or null"
        yield Mistake(key, axes, rule)
    elif len({*listed(axes)}) < len(listed(axes)):
        yield Mistake(key, axes, "must name each mesh axis once")


def _pipeline_mistakes(mesh: MeshConfig) -> Iterator[Mistake]:
    """Yield mistakes in the placement of layers on pipeline stages."""
    layers_axis = mesh.params.get("layers")
    if layers_axis not in (None, "pipeline"):
        rule = "must be pipeline, the axis whose devices are the stages, or null"
        yield Mistake("mesh.params.layers", layers_axis, rule)
    batch_axes = [*listed(mesh.activations.get("batch")), None]
    if mesh.pipeline != 1 and not (layers_axis == "pipeline" == batch_axes[0]):
        rule = "needs mesh.params.layers=pipeline, and pipeline as the first of "
        rule += "mesh.activations.batch; change these, or use mesh.data instead"
        related = ("mesh.params.layers", "mesh.activations.batch")
        yield Mistake("mesh.pipeline", mesh.pipeline, rule, related)


def _offload_mistakes(
    train: TrainConfig, optimizer: OptimizerConfig, *, mesh: MeshConfig
) -> Iterator[Mistake]:
    """Yield mistakes in the offloading of activations and moments."""
    remat = train.remat
    names = train.offload
    if names and remat is Remat.none:
        rule = "needs layers that are recomputed from it: add train.remat=full, or a "
        rule += "list of the results that stay on the device"
        yield Mistake("train.offload", names, rule, ("train.remat",))
    if shared := [name for name in names if name in remat]:
        rule = f"names {shared[0]}, which train.remat keeps on the device; remove it "
        rule += "from one of them"
        yield Mistake("train.offload", names, rule, ("train.remat",))
    if names and mesh.pipeline != 1:
        rule = "must be [] with mesh.pipeline, whose stages keep their activations; "
        rule += "use train.remat=full, or mesh.fsdp instead of the stages"
        yield Mistake("train.offload", names, rule, ("mesh.pipeline",))
    if not optimizer.offload:
        return
    if optimizer.name is not OptimizerName.adamw:
        rule = f"must be false with optimizer.name={optimizer.name}, which "
        rule += "does not update layer by layer; use optimizer=adamw"
        yield Mistake("optimizer.offload", True, rule, ("optimizer.name",))
    if mesh.pipeline != 1:
        rule = "must be false with mesh.pipeline, whose stages have different layers; "
        rule += "use mesh.fsdp instead"
        yield Mistake("optimizer.offload", True, rule, ("mesh.pipeline",))


def _expert_mistakes(mesh: MeshConfig, model: ModelConfig) -> Iterator[Mistake]:
    """Yield mistakes in the placement of experts on devices."""
    is_dense = model.mlp is not Mlp.moe
    if is_dense and mesh.expert != 1:
        rule = "must be 1 with model.mlp=dense, which has no experts; use mesh.data "
        rule += "or mesh.fsdp instead"
        yield Mistake("mesh.expert", mesh.expert, rule, ("model.mlp",))
    expert_axes = listed(mesh.params.get("experts"))
    batch_axes = listed(mesh.activations.get("batch"))
    if not is_dense and any(axis not in batch_axes for axis in expert_axes):
        rule = "must be mesh axes that mesh.activations.batch has too: devices with "
        rule += "different experts exchange tokens; add them there, or use null"
        related = ("mesh.activations.batch",)
        yield Mistake("mesh.params.experts", mesh.params["experts"], rule, related)
