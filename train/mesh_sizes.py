"""The sizes of the mesh axes, and what they must divide. Arithmetic, without JAX."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.choices import Mlp
from train.config import MESH_AXES, Config, MeshConfig, Platform
from train.errors import ConfigError, Mistake, check_all, nearest

# Variables that tell of more processes than this one, or of other devices.
_TELLING = (
    *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "JOB_COMPLETION_INDEX"),
    *("SKYPILOT_NUM_NODES", "TPU_WORKER_HOSTNAMES", "XLA_FLAGS"),
)
_ACCELERATORS = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0")


def listed(entry: Any) -> list[Any]:
    """Return an entry of a rule table, a mesh axis, several or None, as a list."""
    if entry is None:
        return []
    return [*entry] if isinstance(entry, list | tuple) else [entry]


def least_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return every axis' size, -1 replaced by what is left, or 1 if that is no number.

    What these do not divide no mesh of this config divides: rules about them can be
    checked even if they do not multiply to the number of devices.
    """
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    left = 1 if num_devices % fixed else num_devices // fixed
    return {axis: left if size == -1 else size for axis, size in sizes.items()}


def axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return every axis' size, -1 replaced by what is left.

    Raises:
        ConfigError: if the sizes do not multiply to the number of devices.
    """
    sizes = least_sizes(config, num_devices)
    if math.prod(sizes.values()) != num_devices:
        text = " x ".join(f"{axis} {getattr(config, axis)}" for axis in sizes)
        rule = (
            f"must multiply to the {num_devices} devices there are; change a size, set "
            "one axis to -1 (what is left), or runtime.cpu_devices on a CPU"
        )
        raise ConfigError([Mistake("mesh", text, rule)])
    return sizes


def num_shards(sizes: Mapping[str, int], axes: str | Sequence[str] | None) -> int:
    """Return into how many parts a dim on these mesh axes is cut."""
    return math.prod(sizes[axis] for axis in listed(axes))


class Pipeline(NamedTuple):
    """How microbatches pass through stages of layers (model/pipeline.py).

    repeats: groups of layers of each stage.
    """

    stages: int
    repeats: int
    microbatches: int

    @property
    def iterations(self) -> int:
        """In which each stage runs one group of its layers."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of these in which a stage has nothing to do."""
        return (self.stages - 1) / self.iterations

    @property
    def own(self) -> int:
        """Microbatches of each device's own rows."""
        return max(1, self.microbatches // self.stages)


def pipeline_of(config: Config, stages: int) -> Pipeline:
    """Return the pipeline of a config on a mesh with so many stages."""
    if stages == 1:
        return Pipeline(1, 1, 1)
    microbatches = config.train.pipeline_microbatches or stages
    return Pipeline(stages, config.mesh.pipeline_repeats, microbatches)


def check_pipeline(config: Config, sizes: Mapping[str, int]) -> None:
    """Check that layers and microbatches are shared out evenly over stages.

    Raises:
        ConfigError: if not, with all that is not.
    """
    stages, repeats, microbatches = pipeline_of(config, sizes["pipeline"])
    mistakes = list[Mistake]()
    if stages == 1:
        return
    if microbatches % stages:
        rule = f"must be a multiple of mesh.pipeline={stages}, so that stages start "
        rule += f"with as many each; {nearest(microbatches, stages)}, or null"
        mistakes.append(Mistake("train.pipeline_microbatches", microbatches, rule))
    experts, groups = config.model.expert_layers, stages * repeats
    dense = config.model.layers_before_experts
    rest = config.model.num_layers - dense
    wrong = [n for n in (dense, experts or rest) if n % groups]
    if wrong:
        kind = "" if wrong[0] == config.model.num_layers else " of one kind"
        rule = f"x mesh.pipeline_repeats={repeats} must divide the {wrong[0]} layers"
        rule += f"{kind} (model.num_layers, of these model.dense_layers), which lie in "
        rule += "groups of as many on the stages; change stages, repeats or layers"
        mistakes.append(Mistake("mesh.pipeline", stages, rule))
    else:
        windows = config.model.windows
        stacks = windows[:dense], windows[dense:]
        for of in (stack for stack in stacks if stack):
            size = len(of) // groups
            if len({of[i : i + size] for i in range(0, len(of), size)}) > 1:
                rule = f"must be the same in each group of {size} layers that a stage "
                rule += "runs at once; its length must divide them: change stages, "
                rule += "mesh.pipeline_repeats or the pattern"
                pattern = config.model.layer_pattern
                mistakes.append(Mistake("model.layer_pattern", pattern, rule))
    if mistakes:
        raise ConfigError(mistakes)


def check_batch(
    batch_size: int, accumulation: int, shards: int, passes: int = 1
) -> None:
    """Check that every device gets whole rows of each microbatch.

    Args:
        batch_size: rows of the global batch.
        accumulation: microbatches of a step.
        shards: devices that share the rows of a microbatch.
        passes: of a pipeline, for each of its stages.

    Raises:
        ConfigError: if not.
    """
    if batch_size % (shards * accumulation * passes):
        pipeline = "train.pipeline_microbatches / mesh.pipeline"
        rule = (
            f"must be divisible by {shards} (devices that share the batch) x "
            f"{accumulation} (train.accumulation_steps)"
            f"{f' x {passes} ({pipeline})' if passes > 1 else ''}; "
            f"{nearest(batch_size, shards * accumulation * passes)}"
        )
        raise ConfigError([Mistake("data.batch_size", batch_size, rule)])


def check_dims(config: Config, sizes: Mapping[str, int]) -> None:
    """Check that mesh axes divide the model's dims, as far as its config names them.

    Each parameter's are checked where it is laid out (train/sharding.py).

    Raises:
        ConfigError: if not, with all that they do not.
    """
    model, mistakes = config.model, list[Mistake]()
    dims = [
        ("embed", "embed_dim", model.embed_dim),
        ("heads", "num_heads", model.num_heads),
        ("kv_heads", "num_kv_heads", model.kv_heads),
    ]
    if model.mlp is Mlp.moe:
        dims.append(("experts", "num_experts", model.num_experts))
        dims.append(("mlp", "expert_dim", model.expert_size))
    else:
        dims.append(("mlp", "mlp_dim", model.mlp_size))
    for axis, field, size in dims:
        entry, what = config.mesh.params.get(axis), f"model.{field}={size}"
        found = dim_mistakes(sizes, axis, entry, size, what)
        if axis in ("heads", "kv_heads"):  # of which a device computes its own
            entry = config.mesh.activations.get(axis)
            found = found or dim_mistakes(
                sizes, axis, entry=entry, dim=size, what=what, table="activations"
            )
        mistakes += found
    if mistakes:
        raise ConfigError(mistakes)


def dim_mistakes(
    sizes: Mapping[str, int],
    axis: str,
    entry: Any,
    dim: int,
    what: str,
    table: str = "params",
) -> list[Mistake]:
    """Return the mistake if `entry`'s mesh axes do not divide a dim, called `what`."""
    shards = math.prod(sizes.get(name, 1) for name in listed(entry))
    if dim % shards == 0:
        return []
    rule = f"puts {what} on {shards} devices, which do not divide it; change size or "
    rule += f"mesh, or map {axis} to null"
    return [Mistake(f"mesh.{table}.{axis}", entry, rule)]


def mistakes(config: Config, num_devices: int | None = None) -> list[Mistake]:
    """List what the mesh does not divide, as far as that is known without JAX.

    Args:
        config: right in itself.
        num_devices: default: `runtime.cpu_devices`, where nothing else can be meant;
            else the number is left out of it.
    """
    count = num_devices or _cpu_devices(config)
    batch = config.mesh.activations.get("batch")
    rules = (*config.mesh.params.values(), *config.mesh.activations.values())
    known = all(axis in MESH_AXES for entry in rules for axis in listed(entry))
    if config.mesh.planned or not known:
        return []
    sizes = least_sizes(config.mesh, count or 1)
    passes = pipeline_of(config, sizes["pipeline"]).own
    rows, parts = config.data.batch_size, config.train.accumulation_steps
    try:
        check_all(
            lambda: count and axis_sizes(config.mesh, count),
            lambda: check_pipeline(config, sizes),
            lambda: check_batch(rows, parts, num_shards(sizes, batch), passes),
            lambda: check_dims(config, sizes),
        )
    except ConfigError as error:
        return error.mistakes
    return []


def _cpu_devices(config: Config) -> int | None:
    """Return the virtual devices that will be all there are; None if others may be."""
    told = config.distributed.num_processes not in (None, 1)
    if told or any(os.environ.get(name) for name in _TELLING):
        return None
    platform = config.runtime.platform
    asked = platform is Platform.cpu or os.environ.get("JAX_PLATFORMS") == "cpu"
    nothing_else = platform is Platform.auto and not any(
        Path(device).exists() for device in _ACCELERATORS
    )
    return config.runtime.cpu_devices if asked or nothing_else else None
