"""Compute the sizes of mesh axes, and check that they divide dims, without JAX."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import Mistake
from model.choices import Mlp
from model.config import ModelConfig
from model.mixer_catalog import kinds_of
from model.mixer_kind import SharedDim
from model.mlp_kind import mlp_dims, mlps_of
from model.pattern import segments_of
from train.config import (
    MESH_AXES,
    Config,
    DistributedConfig,
    MeshConfig,
    Platform,
    RuntimeConfig,
    TrainConfig,
)
from train.core.shards import PipelineSchedule, listed, num_shards
from train.errors import ConfigError, check_all, nearest

# If one of these environment variables is set, there may be other processes or devices.
_CLUSTER_VARIABLES = (
    *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "JOB_COMPLETION_INDEX"),
    *("SKYPILOT_NUM_NODES", "TPU_WORKER_HOSTNAMES"),
)
_DEVICES_FLAG = "xla_force_host_platform_device_count"
_ACCELERATORS = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0")


def least_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the smallest possible size of every axis, without raising an error.

    -1 becomes the number of remaining devices, or 1 if the fixed sizes do not divide
    the number of devices. If these sizes do not divide an array's dim, then the sizes
    of no mesh of this config divide it.
    """
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    remaining = 1 if num_devices % fixed else num_devices // fixed
    return {axis: remaining if size == -1 else size for axis, size in sizes.items()}


def axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the size of every axis, with -1 replaced by the remaining devices.

    Raises:
        ConfigError: if the sizes do not multiply to the number of devices.
    """
    sizes = least_sizes(config, num_devices)
    if math.prod(sizes.values()) != num_devices:
        text = " x ".join(f"{axis} {getattr(config, axis)}" for axis in sizes)
        rule = (
            f"must multiply to the {num_devices} devices; change a size, set one axis "
            "to -1 (the remaining devices), or set runtime.cpu_devices on a CPU"
        )
        raise ConfigError([Mistake("mesh", text, rule)])
    return sizes


def with_dividing_rules(
    mesh: MeshConfig, sizes: Mapping[str, int], embed_dim: int
) -> MeshConfig:
    """Return a mesh config whose axes divide the embed dim, if that needs no `expert`.

    Parameters that belong to no expert are sharded over the axis `expert` too. If it
    does not divide their embed dim, the devices of this axis have equal copies.
    """
    axes = listed(mesh.params.get("embed"))
    if embed_dim % math.prod(sizes.get(axis, 1) for axis in axes) == 0:
        return mesh
    kept_axes = [axis for axis in axes if axis != "expert"]
    return replace(mesh, params={**mesh.params, "embed": kept_axes})


def pipeline_of(mesh: MeshConfig, train: TrainConfig, stages: int) -> PipelineSchedule:
    """Return the pipeline of a config on a mesh with this number of stages."""
    if stages == 1:
        return PipelineSchedule(1, 1, 1)
    microbatches = train.pipeline_microbatches or stages
    return PipelineSchedule(stages, mesh.pipeline_repeats, microbatches)


def check_pipeline(
    model: ModelConfig, mesh: MeshConfig, train: TrainConfig, sizes: Mapping[str, int]
) -> None:
    """Raise ConfigError if layers and microbatches do not divide over stages."""
    stages, repeats, microbatches = pipeline_of(mesh, train, sizes["pipeline"])
    mistakes = list[Mistake]()
    if stages == 1:
        return
    if microbatches % stages:
        rule = f"must be a multiple of mesh.pipeline={stages}, so that each stage "
        rule += f"starts with the same number; {nearest(microbatches, stages)}, or null"
        key = "train.pipeline_microbatches"
        related = ("mesh.pipeline",)
        mistakes.append(Mistake(key, microbatches, rule, related))
    groups = stages * repeats
    windows = model.windows
    segments = segments_of(model)
    if uneven := [s for s in segments if s.repeats % groups]:
        size = len(uneven[0].pattern)
        times = uneven[0].repeats
        layers = f"{times} layers" if size == 1 else f"{times} groups of {size} layers"
        kind = " of one kind" if len(segments) > 1 else ""
        rule = f"x mesh.pipeline_repeats={repeats} must divide the {layers}{kind} "
        rule += "(model.num_layers, of these model.dense_layers), which form "
        rule += "equal groups on the stages; change stages, repeats or layers"
        related = ("mesh.pipeline_repeats", "model.num_layers", "model.dense_layers")
        related = (*related, "model.mixer_pattern")
        mistakes.append(Mistake("mesh.pipeline", stages, rule, related))
    else:
        for segment in segments:
            size = segment.num_layers // groups
            stop = segment.first + segment.num_layers
            starts = range(segment.first, stop, size)
            if len({windows[start : start + size] for start in starts}) > 1:
                rule = f"must be the same in each group of {size} layers that a stage "
                rule += "runs at once; its length must divide them: change stages, "
                rule += "mesh.pipeline_repeats or the pattern"
                pattern = model.layer_pattern
                mistakes.append(Mistake("model.layer_pattern", pattern, rule))
    if mistakes:
        raise ConfigError(mistakes)


def check_batch(
    batch_size: int, accumulation: int, shards: int, local_microbatches: int = 1
) -> None:
    """Raise ConfigError if devices cannot get equal numbers of a microbatch's rows.

    `shards` is the number of devices that share the rows of a microbatch, and
    `local_microbatches` the number of pipeline microbatches of each device's rows.
    """
    if batch_size % (divisor := shards * accumulation * local_microbatches):
        rule = f"must be divisible by {shards} (devices that share the batch) x "
        rule += f"{accumulation} (train.accumulation_steps)"
        if local_microbatches > 1:
            rule += f" x {local_microbatches} "
            rule += "(train.pipeline_microbatches / mesh.pipeline)"
        rule += f"; {nearest(batch_size, divisor)}"
        related = ("train.accumulation_steps", "train.pipeline_microbatches")
        raise ConfigError([Mistake("data.batch_size", batch_size, rule, related)])


def check_dims(model: ModelConfig, mesh: MeshConfig, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if mesh axes do not divide the dims of the model's config.

    The dims of each parameter are checked when it is sharded (`param_specs`).
    """
    mistakes = list[Mistake]()
    mesh = with_dividing_rules(mesh, sizes, model.embed_dim)
    dims = [SharedDim("embed", "embed_dim", model.embed_dim)]
    for mixer in dict.fromkeys(model.mixers):
        dims += kinds_of(model)[mixer].dims(model)
    if model.mlp is Mlp.moe:
        dims.append(SharedDim("experts", "num_experts", model.num_experts))
        dims.append(SharedDim("mlp", "expert_dim", model.expert_size))
    else:
        mlp = mlps_of(model).get(model.mlp)
        dims += mlp_dims(model) if mlp is None else mlp.dims(model)
    for axis, field, size in dict.fromkeys(dims):
        # The heads of activations are sharded too.
        tables = ["params", "activations"] if "heads" in axis else ["params"]
        for table in tables:
            entry = getattr(mesh, table).get(axis)
            description = f"model.{field}={size}"
            mistake = dim_mistake(sizes, axis, entry, size, description, table)
            if mistake is not None:
                mistakes.append(mistake._replace(related=(f"model.{field}",)))
                break
    if mistakes:
        raise ConfigError(mistakes)


def dim_mistake(
    sizes: Mapping[str, int],
    axis: str,
    entry: Any,
    dim: int,
    description: str,
    table: str = "params",
) -> Mistake | None:
    """Return a mistake if the mesh axes of a rule table's entry do not divide a dim.

    `description` names the dim and its size in the message.
    """
    shards = math.prod(sizes.get(name, 1) for name in listed(entry))
    if dim % shards == 0:
        return None
    rule = f"puts {description} on {shards} devices, which do not divide it; change "
    rule += f"size or mesh, or map {axis} to null"
    return Mistake(f"mesh.{table}.{axis}", entry, rule)


def mesh_mistakes(config: Config, num_devices: int | None = None) -> list[Mistake]:
    """List the mistakes of a mesh that are known without JAX.

    Every other check of the config must have passed. `num_devices` defaults to
    `runtime.cpu_devices`. If there may be other devices, their number is not checked.
    """
    mesh = config.mesh
    train = config.train
    num_known_devices = num_devices or _cpu_devices(config.runtime, config.distributed)
    batch = mesh.activations.get("batch")
    rules = (*mesh.params.values(), *mesh.activations.values())
    axes_exist = all(axis in MESH_AXES for entry in rules for axis in listed(entry))
    if mesh.planned or not axes_exist:
        return []
    sizes = least_sizes(mesh, num_known_devices or 1)
    local_microbatches = pipeline_of(mesh, train, sizes["pipeline"]).local_microbatches
    try:
        check_all(
            lambda: num_known_devices and axis_sizes(mesh, num_known_devices),
            lambda: check_pipeline(config.model, mesh, train, sizes),
            lambda: check_batch(
                config.data.batch_size,
                train.accumulation_steps,
                num_shards(sizes, batch),
                local_microbatches,
            ),
            lambda: check_dims(config.model, mesh, sizes),
        )
    except ConfigError as error:
        return error.mistakes
    return []


def _cpu_devices(runtime: RuntimeConfig, distributed: DistributedConfig) -> int | None:
    """Return the number of virtual devices, or None if there may be other devices."""
    is_distributed = distributed.num_processes not in (None, 1)
    if is_distributed or any(os.environ.get(name) for name in _CLUSTER_VARIABLES):
        return None
    if _DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    platform = runtime.platform
    is_cpu = platform is Platform.cpu or os.environ.get("JAX_PLATFORMS") == "cpu"
    auto_is_cpu = platform is Platform.auto and not any(
        Path(device).exists() for device in _ACCELERATORS
    )
    return runtime.cpu_devices if is_cpu or auto_is_cpu else None
