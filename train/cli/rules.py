"""Which configs are allowed: the rules between keys.

Types and bounds of each key stand beside it in its dataclass, and hold here already.
Everything here is checked before a device is touched; what depends on the number
of devices is checked where they are counted.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

from data.config import DataConfig, Source
from model.choices import Activation, Mlp, Position, Scaling
from model.config import LOGICAL_AXES, ModelConfig
from train.config import (
    MESH_AXES,
    Config,
    MeshConfig,
    OptimizerName,
    Remat,
    Schedule,
)
from train.errors import Mistake, nearest
from train.identity import differences
from train.mesh_sizes import listed
from train.watching import EvalSet

_SCORES = ("loss", "bits_per_byte")  # names in metrics.jsonl
# What no array of a table has.
_UNUSED = {"params": "batch", "activations": "layers"}
# Dims of one activation, which cannot lie on one mesh axis.
_OF_ROWS = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp")
_TOGETHER = (
    *product(_OF_ROWS, ("batch", "seq")),
    *product(["head_dim"], ("heads", "kv_heads")),
)


def validate(config: Config) -> list[Mistake]:
    """List every mistake between keys that shows without counting devices."""
    return [
        *(Mistake(f"model.{k}", v, rule) for k, v, rule in config.model.mistakes()),
        *(Mistake(f"data.{k}", v, rule) for k, v, rule in config.data.mistakes()),
        *_across(config),
        *_mesh(config.mesh),
        *_tables(config.mesh),
        *_experts(config),
        *_pipeline(config),
        *_offload(config),
        *set_mistakes(config.eval.sets, config.data, "eval.sets"),
    ]


def must_name_run(config: Any) -> list[Mistake]:
    """List the mistakes of a command on a run: one that names none."""
    rule = "must name the run to read; set run.dir=runs/<name> or run.name"
    named = config.run.name or config.run.dir
    return [] if named else [Mistake("run.dir", None, rule)]


def _across(config: Config) -> Iterator[Mistake]:
    """Yield what does not go together, and what is wrong in ways that no bound says."""
    model, data, run, schedule = config.model, config.data, config.run, config.schedule
    address, steps = config.distributed.coordinator_address, config.profile.steps
    accumulation, num_steps = config.train.accumulation_steps, config.train.num_steps
    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdigit()):
        rule = "must be host:port of process 0, say 10.0.0.1:8476, or null"
        yield Mistake("distributed.coordinator_address", address, rule)
    if steps and not (len(steps) == 2 and 1 <= steps[0] < steps[1]):
        rule = "must be two ascending steps from 1 on such as [10,12], or []"
        yield Mistake("profile.steps", steps, rule)
    if data.batch_size % accumulation:
        rule = f"must be divisible by train.accumulation_steps={accumulation}; "
        rule += nearest(data.batch_size, accumulation)
        yield Mistake("data.batch_size", data.batch_size, rule)
    if run.lease_timeout_s < 4 * run.lease_interval_s:
        rule = f"must be at least 4 times run.lease_interval_s={run.lease_interval_s}, "
        rule += "or a busy owner passes for dead"
        yield Mistake("run.lease_timeout_s", run.lease_timeout_s, rule)
    server = config.tracker.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if config.tracker.mlflow.enabled and not server and "://" in (run.dir or ""):
        rule = f"must name a server: MLflow keeps no files under run.dir={run.dir}"
        yield Mistake("tracker.mlflow.uri", None, rule)
    learned, longest = model.position is Position.learned, model.max_sequence_length
    if learned and longest is not None and data.sequence_length > longest:
        rule = f"must be at most model.max_sequence_length={longest} with learned "
        rule += "positions; lower it, raise that, or choose model.position=rotary"
        yield Mistake("data.sequence_length", data.sequence_length, rule)
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if schedule.name is Schedule.wsd and decay and warmup + decay > num_steps:
        rule = f"must leave room for schedule.warmup_steps={warmup} within "
        rule += f"train.num_steps={num_steps}; lower schedule.warmup_steps or this one "
        rule += "(null: 30 % of the steps)"
        yield Mistake("schedule.decay_steps", decay, rule)


def set_mistakes(
    sets: Mapping[str, EvalSet], data: DataConfig, table: str
) -> Iterator[Mistake]:
    """Yield validation sets that cannot be told apart, or are nowhere."""
    for name, eval_set in sets.items():
        if not re.fullmatch(r"[\w-]+", name) or name in _SCORES:
            rule = "must be called by letters, digits, _ and -, and not "
            yield Mistake(f"{table}.{name}", eval_set.path, rule + " or ".join(_SCORES))
        if name in data.sources:
            rule = "is called as a source of data.sources is; give it another name"
            yield Mistake(f"{table}.{name}", eval_set.path, rule)
        if not eval_set.path:
            rule = "must name a token store, or text where data.path is text"
            yield Mistake(f"{table}.{name}.path", eval_set.path, rule)


def _mesh(mesh: MeshConfig) -> Iterator[Mistake]:
    """Yield what is wrong with sizes of the axes, or their factors across hosts."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    unsized = [axis for axis, size in sizes.items() if size == -1]
    for axis, size in sizes.items():
        key, factor = f"mesh.{axis}", getattr(mesh.dcn, axis)
        if axis in unsized[1:]:
            rule = f"only one axis may be -1 (what is left), and mesh.{unsized[0]} is"
            yield Mistake(key, size, f"{rule}; give this one a number")
        if size >= 1 and size % factor:
            rule = f"must divide {key}={size}, of which it is the part across hosts"
            yield Mistake(f"mesh.dcn.{axis}", factor, rule)


def _tables(mesh: MeshConfig) -> Iterator[Mistake]:
    """Yield what is wrong with the two tables of rules, or missing from them."""
    sequence = mesh.activations.get("seq", "context")  # that it is missing comes below
    if sequence != "context" and (sequence is not None or mesh.context != 1):
        rule = "must be context, which cuts rows; or null with mesh.context=1"
        yield Mistake("mesh.activations.seq", sequence, rule)
    rows = mesh.activations.get("batch")
    if "context" in listed(rows):
        rule = "must not name context, along which devices share rows; leave it out"
        yield Mistake("mesh.activations.batch", rows, rule)
    for table, unused in _UNUSED.items():
        entries = getattr(mesh, table)
        for name in LOGICAL_AXES:
            if name not in entries and name != unused:
                rule = "is missing, and every logical axis needs a rule; give a mesh "
                rule += "axis, a list, or null (replicated): configs/mesh/rules.yaml"
                yield Mistake(f"mesh.{table}.{name}", "", rule)
        for name, axes in entries.items():
            yield from _entry(f"mesh.{table}.{name}", name, axes)
    for name, paired in _TOGETHER:
        axes, paired_axes = mesh.activations.get(name), mesh.activations.get(paired)
        if shared := [axis for axis in listed(axes) if axis in listed(paired_axes)]:
            rule = (
                f"must not name {shared[0]}, on which mesh.activations.{paired} lies: "
            )
            rule += "both are dims of one array; take another mesh axis, or null"
            yield Mistake(f"mesh.activations.{name}", axes, rule)


def _entry(key: str, name: str, axes: Any) -> Iterator[Mistake]:
    """Yield what is wrong with one rule by itself."""
    if name not in LOGICAL_AXES:
        rule = f"is no logical axis; they are {', '.join(LOGICAL_AXES)}"
        yield Mistake(key, axes, rule)
    if any(axis not in MESH_AXES for axis in listed(axes)):
        rule = f"must be a mesh axis ({', '.join(MESH_AXES)}), a list, or null"
        yield Mistake(key, axes, rule)
    elif len({*listed(axes)}) < len(listed(axes)):
        yield Mistake(key, axes, "must name each mesh axis once")


def _pipeline(config: Config) -> Iterator[Mistake]:
    """Yield what does not let layers lie on stages."""
    mesh, layers = config.mesh, config.mesh.params.get("layers")
    if layers not in (None, "pipeline"):
        rule = "must be pipeline, whose devices are the stages of layers, or null"
        yield Mistake("mesh.params.layers", layers, rule)
    rows = [*listed(mesh.activations.get("batch")), None]
    if mesh.pipeline != 1 and not (layers == "pipeline" == rows[0]):
        rule = "needs mesh.params.layers=pipeline, and pipeline as the first of "
        rule += "mesh.activations.batch; change these, or take mesh.data instead"
        yield Mistake("mesh.pipeline", mesh.pipeline, rule)


def _offload(config: Config) -> Iterator[Mistake]:
    """Yield what cannot wait in host memory."""
    remat, names = config.train.remat, config.train.offload
    if names and remat is Remat.none:
        rule = "needs a layer that is recomputed from it: add train.remat=full, or a "
        yield Mistake("train.offload", names, rule + "list of what stays on the device")
    if shared := [name for name in names if name in remat]:
        rule = (
            f"names {shared[0]}, which train.remat keeps on the device; leave it out "
        )
        yield Mistake("train.offload", names, rule + "of one of them")
    if names and config.mesh.pipeline != 1:
        rule = "must be [] with mesh.pipeline, whose stages keep what passes through "
        rule += "them; take train.remat=full, or mesh.fsdp instead of the stages"
        yield Mistake("train.offload", names, rule)
    if not config.optimizer.offload:
        return
    if config.optimizer.name is not OptimizerName.adamw:
        rule = f"must be false with optimizer.name={config.optimizer.name}, which "
        rule += "does not update layer by layer; take optimizer=adamw"
        yield Mistake("optimizer.offload", True, rule)
    if config.mesh.pipeline != 1:
        rule = "must be false with mesh.pipeline, whose stages have other layers each; "
        rule += "take mesh.fsdp instead"
        yield Mistake("optimizer.offload", True, rule)


def _experts(config: Config) -> Iterator[Mistake]:
    """Yield what does not let devices share experts."""
    mesh, dense = config.mesh, config.model.mlp is Mlp.dense
    if dense and mesh.expert != 1:
        rule = "must be 1 with model.mlp=dense, which has no experts; take mesh.data "
        yield Mistake("mesh.expert", mesh.expert, rule + "or mesh.fsdp instead")
    axes = listed(mesh.params.get("experts"))
    rows = listed(mesh.activations.get("batch"))
    if not dense and any(axis not in rows for axis in axes):
        rule = "must be mesh axes that mesh.activations.batch has too: devices with "
        rule += "other experts bring each other tokens; add them there, or say null"
        yield Mistake("mesh.params.experts", mesh.params.get("experts"), rule)


def _unread_by(optimizer: OptimizerName) -> Iterator[tuple[bool, str, str]]:
    """Yield the keys that other optimizers read."""
    keys = {
        OptimizerName.adamw: ["muon_"],
        OptimizerName.muon: [],
        OptimizerName.lion: ["muon_", "epsilon"],
        OptimizerName.adafactor: ["muon_", "epsilon", "b1", "b2", "moment_dtype"],
    }
    for key in keys[optimizer]:
        yield True, f"optimizer.{key}", f"optimizer.name is {optimizer}"


def _unread_of(model: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield the keys of a model that other choices of it read."""
    learned, scaling = model.position is Position.learned, model.rope_scaling.kind
    for key in ("rope_theta", "rope_scaling", "rotary_fraction"):
        yield learned, f"model.{key}", "model.position is learned"
    unscaled = scaling is Scaling.none and not learned
    yield unscaled, "model.rope_scaling.", "model.rope_scaling.kind is none"
    yield not model.qk_norm, "model.qk_norm_over", "model.qk_norm is false"
    unused = model.activation is not Activation.clamped_swiglu
    yield unused, "model.swiglu_", f"model.activation is {model.activation}"
    for key in (
        *("num_experts", "experts_per_token", "expert_dim", "shared_experts"),
        *("dense_layers", "experts_every", "router"),
    ):
        yield model.mlp is Mlp.dense, f"model.{key}", "model.mlp is dense"


def without_effect(config: Config) -> list[str]:
    """Name changed settings that nothing reads, and a warm-up that never ends."""
    changed = sorted(diff.key for diff in differences(Config(), config))
    schedule, source = config.schedule.name, config.data.source
    decays, constant = schedule is Schedule.wsd, schedule is Schedule.constant
    model = config.model
    unread = [
        *_unread_by(config.optimizer.name),
        *_unread_of(model),
        (not decays, "schedule.decay_steps", "schedule.name is not wsd"),
        (constant, "schedule.final_fraction", "schedule.name is constant"),
        (config.mesh.pipeline == 1, "mesh.pipeline_repeats", "mesh.pipeline is 1"),
        (config.mesh.pipeline == 1, "train.pipeline_", "mesh.pipeline is 1"),
        (source is Source.python, "data.on_error", f"data.source is {source}"),
        (not config.eval.tasks, "eval.task_", "eval.tasks is []"),
    ]
    for name in (tracker.name for tracker in fields(config.tracker)):
        off = not getattr(config.tracker, name).enabled
        unread.append((off, f"tracker.{name}.", f"tracker.{name}.enabled is false"))
    stored = source in (Source.tokens, Source.mixture)  # the store brings its own
    unread += [
        (stored, f"data.{key}", f"data.source is {source}")
        for key in ("validation", "tokenizer", "pattern", "on_error")
    ]
    warnings = [
        f"{key} has no effect: {why}"
        for unused, prefix, why in unread
        for key in changed
        if unused and key.startswith(prefix)
    ]
    for key in ("remat", "offload"):
        if "mlp_gate" in getattr(config.train, key) and not model.gated:
            makes = f"model.activation={model.activation} makes none"
            warnings.append(f"train.{key} keeps mlp_gate in vain: {makes}")
    steps, warmup = config.train.num_steps, config.schedule.warmup_steps
    if warmup >= steps:
        warnings.append(
            f"schedule.warmup_steps={warmup} is not below train.num_steps={steps}: the "
            "learning rate never reaches its peak"
        )
    return warnings
