"""The ways to lay a step out on devices."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from train.config import Config, DcnConfig, Remat
from train.errors import ConfigError
from train.mesh import axis_sizes

_MOST_TENSOR = 16


@dataclass(frozen=True)
class Layout:
    """A layout: sizes of the mesh axes, which of them cross slices or nodes, and how
    a step is cut and recomputed."""

    data: int
    fsdp: int
    tensor: int
    dcn_data: int
    dcn_fsdp: int
    remat: str
    accumulation_steps: int

    @property
    def overrides(self) -> str:
        """What to type."""
        mesh = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        dcn = {"data": self.dcn_data, "fsdp": self.dcn_fsdp}
        return " ".join(
            [
                *(f"mesh.{axis}={n}" for axis, n in mesh.items()),
                *(f"mesh.dcn.{axis}={n}" for axis, n in dcn.items() if n > 1),
                f"train.remat={self.remat}",
                f"train.accumulation_steps={self.accumulation_steps}",
            ]
        )

    def applied(self, config: Any) -> Any:
        """Give a config with this layout."""
        mesh = replace(
            config.mesh,
            **{"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor},
            **{"context": 1, "expert": 1, "planned": False},
            dcn=DcnConfig(data=self.dcn_data, fsdp=self.dcn_fsdp),
        )
        train = replace(
            config.train,
            remat=Remat(self.remat),
            accumulation_steps=self.accumulation_steps,
        )
        return replace(config, mesh=mesh, train=train)


def layouts(num_devices: int, parts: int) -> list[Layout]:
    """List the meshes: parts are slices or nodes; tensor stays inside of one."""
    inside = num_devices // parts
    found = []
    for tensor in _divisors(inside):
        for fsdp in _divisors(inside // tensor):
            data = inside // tensor // fsdp
            if tensor > _MOST_TENSOR:
                continue
            found.append(
                Layout(data * parts, fsdp, tensor, parts, 1, Remat.none.value, 1)
            )
            if parts > 1:
                found.append(
                    Layout(data, fsdp * parts, tensor, 1, parts, Remat.none.value, 1)
                )
    return found


def variants(layout: Layout, batch_size: int) -> Iterator[Layout]:
    """Give a mesh each way to recompute, and each number of microbatches."""
    rows = batch_size // (layout.data * layout.fsdp)
    for remat, steps in itertools.product(Remat, _powers_of_two(rows)):
        yield replace(layout, remat=remat.value, accumulation_steps=steps)


def layout_of(config: Config, num_devices: int) -> Layout | None:
    """Read the layout that a config has; None if it leaves that to the plan."""
    if config.mesh.planned:
        return None
    try:
        sizes = axis_sizes(config.mesh, num_devices)
    except ConfigError:
        return None
    return Layout(
        **{axis: sizes[axis] for axis in ("data", "fsdp", "tensor")},
        dcn_data=config.mesh.dcn.data,
        dcn_fsdp=config.mesh.dcn.fsdp,
        remat=config.train.remat.value,
        accumulation_steps=config.train.accumulation_steps,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers_of_two(most: int) -> list[int]:
    return [n for n in (2**i for i in range(most.bit_length())) if most % n == 0]
