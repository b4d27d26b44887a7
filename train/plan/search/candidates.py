"""List the layouts of a step that a search weighs."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from train.config import MESH_AXES, DcnConfig, MeshConfig, TrainConfig
from train.plan.precision import with_changes
from train.plan.recomputing import format_policy, parse_policy
from train.resolve.mesh_sizes import least_sizes

_MAX_TENSOR = 16
_MIN_POSITIONS = 8192  # least positions of a row on a device of a context axis


@dataclass(frozen=True)
class Layout:
    """A mesh and other settings that a search varies.

    A field with the name of a mesh axis is its size; `dcn_*` is its size across slices
    or nodes. `remat` is a policy in the syntax of `format_policy`.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    dcn_data: int = 1
    dcn_fsdp: int = 1
    remat: str = "none"
    accumulation_steps: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    dcn_pipeline: int = 1
    dcn_context: int = 1
    dcn_expert: int = 1
    dcn_tensor: int = 1
    changes: tuple[str, ...] = ()  # overrides of plan/precision.py

    @property
    def dcn(self) -> DcnConfig:
        """The sizes of the mesh axes across slices or nodes."""
        return DcnConfig(**{axis: getattr(self, f"dcn_{axis}") for axis in MESH_AXES})

    def overrides(self, mesh: MeshConfig) -> str:
        """Return the overrides that give a config with this mesh the layout."""
        overrides = ["mesh.planned=false"] if mesh.planned else []
        tables = ("mesh", self, mesh), ("mesh.dcn", self.dcn, mesh.dcn)
        for (section, sizes, current), axis in itertools.product(tables, MESH_AXES):
            if (size := getattr(sizes, axis)) > 1 or getattr(current, axis) != 1:
                overrides.append(f"{section}.{axis}={size}")
        overrides.append(f"train.remat={self.remat}")
        overrides.append(f"train.accumulation_steps={self.accumulation_steps}")
        return " ".join([*overrides, *self.changes])

    def applied(self, config: Any) -> Any:
        """Return a config with this layout."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        mesh = replace(config.mesh, **sizes, planned=False, dcn=self.dcn)
        train = replace(
            config.train,
            remat=parse_policy(self.remat),
            accumulation_steps=self.accumulation_steps,
        )
        return with_changes(replace(config, mesh=mesh, train=train), self.changes)


def layouts(
    num_devices: int, num_slices: int, experts: int = 0, sequence_length: int = 0
) -> list[Layout]:
    """List the possible meshes, without rematerialisation and with one microbatch.

    The tensor, expert and context axes stay inside a slice or node. Either data,
    fsdp or pipeline spans all slices or nodes. A pipeline has one stage in each. Only
    long rows are sharded over context.
    """
    meshes = list[Layout]()
    slice_size = num_devices // num_slices
    divisors = [n for n in range(1, slice_size + 1) if slice_size % n == 0]
    limits = _MAX_TENSOR, max(experts, 1), max(sequence_length // _MIN_POSITIONS, 1)
    sizes = ([n for n in divisors if n <= limit] for limit in limits)
    for tensor, expert, context, fsdp in itertools.product(*sizes, divisors):
        data, remainder = divmod(slice_size, tensor * expert * context * fsdp)
        if remainder:
            continue
        layout = Layout(data, fsdp, tensor, context=context, expert=expert)
        meshes.append(replace(layout, data=data * num_slices, dcn_data=num_slices))
        if num_slices > 1:
            sharded = replace(layout, fsdp=fsdp * num_slices, dcn_fsdp=num_slices)
            staged = replace(layout, pipeline=num_slices, dcn_pipeline=num_slices)
            meshes += [sharded, staged]
    return meshes


def layout_of(
    mesh: MeshConfig, train: TrainConfig, *, num_devices: int
) -> Layout | None:
    """Return the layout of a config, which may be impossible; None if it is planned."""
    if mesh.planned:
        return None
    sizes: dict[str, Any] = {**least_sizes(mesh, num_devices)}
    sizes |= {f"dcn_{axis}": getattr(mesh.dcn, axis) for axis in MESH_AXES}
    policy = format_policy(train.remat)
    return Layout(**sizes, remat=policy, accumulation_steps=train.accumulation_steps)
