"""The ways to lay a step out on devices."""

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

_ALWAYS = ("data", "fsdp", "tensor")  # typed even where they are 1
_MOST_TENSOR = 16
_LEAST_POSITIONS = 8192  # shorter rows are not divided among devices


@dataclass(frozen=True)
class Layout:
    """A layout: sizes of the mesh axes, which of them cross slices or nodes, and how
    a step is cut and recomputed (as train/plan/recomputing.py types it), or changed."""

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
    def of_layers(self) -> tuple[int, ...]:
        """Into how many parts layers are cut, and what passes between them."""
        return self.tensor, self.expert, self.context, self.pipeline

    @property
    def dcn(self) -> DcnConfig:
        """Which axes cross slices or nodes."""
        return DcnConfig(**{axis: getattr(self, f"dcn_{axis}") for axis in MESH_AXES})

    def overrides(self, config: Config) -> str:
        """Return the overrides to add to a config's command."""
        mesh, dcn = config.mesh, self.dcn
        sizes = {
            axis: getattr(self, axis)
            for axis in (*_ALWAYS, *(a for a in MESH_AXES if a not in _ALWAYS))
            if axis in _ALWAYS or getattr(self, axis) > 1 or getattr(mesh, axis) != 1
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
    num_devices: int, parts: int, experts: int = 0, sequence_length: int = 0
) -> list[Layout]:
    """List the meshes: parts are slices or nodes; only some axes go beyond one.

    Stages are parts: inside of one the network is fast enough for fsdp. Devices that
    bring each other tokens, and those that share a matrix or rows, lie inside of one.

    Args:
        num_devices: of all parts.
        parts: of as many devices each.
        experts: of the model; 0: it has none.
        sequence_length: of a row, which devices share only where it is long.
    """
    inside = num_devices // parts
    layouts_found = []
    largest = {"tensor": _MOST_TENSOR, "expert": max(experts, 1)}
    largest["context"] = max(sequence_length // _LEAST_POSITIONS, 1)
    sizes = ([n for n in _divisors(inside) if n <= limit] for limit in largest.values())
    for tensor, expert, context in itertools.product(*sizes):
        remainder, uneven = divmod(inside, tensor * expert * context)
        if uneven:
            continue
        for fsdp in _divisors(remainder):
            data = remainder // fsdp
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
            replicas = {"data": data * parts, "dcn_data": parts}
            layouts_found.append(replace(layout, **replicas))
            if parts > 1:
                shards = {"fsdp": fsdp * parts, "dcn_fsdp": parts}
                stages = {"pipeline": parts, "dcn_pipeline": parts}
                layouts_found += [replace(layout, **shards), replace(layout, **stages)]
    return layouts_found


def variants(
    layout: Layout,
    batch_size: int,
    model: ModelConfig,
    offload: Sequence[OffloadName] = (),
    passes: int = 1,
) -> list[Layout]:
    """Return a mesh with each way to recompute, and each number of microbatches.

    First comes what computes the least, last what needs the least memory. Of each
    microbatch every device has whole rows for each of the `passes` of a pipeline.
    """
    shards = layout.data * layout.fsdp * layout.expert * layout.pipeline
    alternatives = policies_with_offload(offload)
    numbers = _powers_of_two(batch_size // (shards * passes))
    return [
        replace(layout, remat=format_policy(way), accumulation_steps=steps)
        for way in reversed(policies_for(model))
        for steps in numbers
        if way in alternatives
    ]


def layout_of(config: Config, num_devices: int) -> Layout | None:
    """Read the layout that a config has; None if it leaves that to the plan."""
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


def _powers_of_two(largest: int) -> list[int]:
    return [n for n in (2**i for i in range(largest.bit_length())) if largest % n == 0]
