"""List the layouts of a step that a search weighs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.choices import OffloadName
from model.config import ModelConfig
from train.config import MESH_AXES, Config, DcnConfig
from train.errors import ConfigError
from train.mesh_sizes import axis_sizes
from train.plan.precision import with_changes
from train.plan.recomputing import (
    format_policy,
    parse_policy,
    policies_for,
    policies_with_offload,
)

_REQUIRED = ("data", "fsdp", "tensor")  # in the overrides even if their size is 1
_MAX_TENSOR = 16
_MIN_POSITIONS = 8192  # least positions of a row on a device of a context axis


@dataclass(frozen=True)
class Layout:
    """A mesh and other settings that a search varies.

    A field with the name of a mesh axis is its size; `dcn_*` is its size across slices
    or nodes. `remat` is a policy in the syntax of `format_policy`.
    """

    data: int
    fsdp: int
    tensor: int
    dcn_data: int
    dcn_fsdp: int
    remat: str
    accumulation_steps: int
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    dcn_pipeline: int = 1
    dcn_context: int = 1
    dcn_expert: int = 1
    dcn_tensor: int = 1
    changes: tuple[str, ...] = ()  # overrides of plan/precision.py

    @property
    def layer_shards(self) -> tuple[int, ...]:
        """The sizes of the axes that shard the layers or their activations."""
        return self.tensor, self.expert, self.context, self.pipeline

    @property
    def dcn(self) -> DcnConfig:
        """The sizes of the mesh axes across slices or nodes."""
        return DcnConfig(**{axis: getattr(self, f"dcn_{axis}") for axis in MESH_AXES})

    def overrides(self, config: Config) -> str:
        """Return the overrides that give a config this layout."""
        mesh, dcn = config.mesh, self.dcn
        sizes = {
            axis: getattr(self, axis)
            for axis in (*_REQUIRED, *(a for a in MESH_AXES if a not in _REQUIRED))
            if axis in _REQUIRED or getattr(self, axis) > 1 or getattr(mesh, axis) != 1
        }
        factors = {
            axis: getattr(dcn, axis)
            for axis in MESH_AXES
            if getattr(dcn, axis) > 1 or getattr(mesh.dcn, axis) > 1
        }
        return " ".join(
            [
                *(["mesh.planned=false"] if mesh.planned else []),
                *(f"mesh.{axis}={n}" for axis, n in sizes.items()),
                *(f"mesh.dcn.{axis}={n}" for axis, n in factors.items()),
                f"train.remat={self.remat}",
                f"train.accumulation_steps={self.accumulation_steps}",
                *self.changes,
            ]
        )

    def applied(self, config: Any) -> Any:
        """Return a config with this layout."""
        mesh = replace(
            config.mesh,
            **{axis: getattr(self, axis) for axis in MESH_AXES},
            planned=False,
            dcn=self.dcn,
        )
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
    fsdp or pipeline spans all slices or nodes. A pipeline has one stage in each.

    Args:
        num_devices: the number of all devices.
        num_slices: the number of slices or nodes.
        experts: the number of experts of the model, or 0.
        sequence_length: the length of a row. Only long rows are sharded over context.
    """
    slice_size = num_devices // num_slices
    meshes = []
    max_sizes = {"tensor": _MAX_TENSOR, "expert": max(experts, 1)}
    max_sizes["context"] = max(sequence_length // _MIN_POSITIONS, 1)
    sizes = (
        [n for n in _divisors(slice_size) if n <= limit] for limit in max_sizes.values()
    )
    for tensor, expert, context in itertools.product(*sizes):
        unassigned, indivisible = divmod(slice_size, tensor * expert * context)
        if indivisible:
            continue
        for fsdp in _divisors(unassigned):
            data = unassigned // fsdp
            layout = Layout(
                data=data,
                fsdp=fsdp,
                tensor=tensor,
                dcn_data=1,
                dcn_fsdp=1,
                remat="none",
                accumulation_steps=1,
                expert=expert,
                context=context,
            )
            replica_sizes = {"data": data * num_slices, "dcn_data": num_slices}
            meshes.append(replace(layout, **replica_sizes))
            if num_slices > 1:
                shards = {"fsdp": fsdp * num_slices, "dcn_fsdp": num_slices}
                stages = {"pipeline": num_slices, "dcn_pipeline": num_slices}
                meshes += [replace(layout, **shards), replace(layout, **stages)]
    return meshes


def variants(
    layout: Layout,
    batch_size: int,
    model: ModelConfig,
    offload: Sequence[OffloadName] = (),
    passes: int = 1,
) -> list[Layout]:
    """Return a mesh with each remat policy and each number of microbatches.

    The variant with the least FLOPs comes first, and the one with the least memory
    last. `passes` is the number of a pipeline's local microbatches (mesh_sizes.py):
    each of them has at least one row.
    """
    shards = layout.data * layout.fsdp * layout.expert * layout.pipeline
    allowed = policies_with_offload(offload)
    microbatches = _powers_of_two_in(batch_size // (shards * passes))
    return [
        replace(layout, remat=format_policy(policy), accumulation_steps=n)
        for policy in reversed(policies_for(model))
        for n in microbatches
        if policy in allowed
    ]


def layout_of(config: Config, num_devices: int) -> Layout | None:
    """Return the layout of a config; None if its mesh is planned or impossible."""
    if config.mesh.planned:
        return None
    try:
        sizes: dict[str, Any] = {**axis_sizes(config.mesh, num_devices)}
    except ConfigError:
        return None
    return Layout(
        **sizes,
        **{f"dcn_{axis}": getattr(config.mesh.dcn, axis) for axis in MESH_AXES},
        remat=format_policy(config.train.remat),
        accumulation_steps=config.train.accumulation_steps,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers_of_two_in(number: int) -> list[int]:
    """Return the powers of two that divide a number."""
    return [n for n in (2**i for i in range(number.bit_length())) if number % n == 0]
