"""The step of a config, divided over mesh axes and into microbatches."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from train.config import MESH_AXES, Config, MeshConfig
from train.prove.inputs import PADDING_IDS
from train.resolve.mesh import Device
from train.resolve.program import ConfiguredProgram, make_program

ACCUMULATION = "train.accumulation_steps"


def mesh_of(mesh: MeshConfig) -> dict[str, int]:
    """Return the mesh axes of more than one device and their sizes."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    return {axis: size for axis, size in sizes.items() if size != 1}


@dataclass(frozen=True)
class DividedStep:
    """The step of a config whose mesh axes have explicit sizes."""

    config: Config

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes of more than one device and their sizes."""
        return mesh_of(self.config.mesh)

    @property
    def parts(self) -> list[str]:
        """The mesh axes of several devices, and the key of microbatches if any."""
        has_parts = self.config.train.accumulation_steps > 1
        return [*self.mesh, *[ACCUMULATION] * has_parts]

    def without(self, parts: Iterable[str]) -> "DividedStep":
        """Return the step with one device along mesh axes, or without microbatches."""
        axes = dict.fromkeys({*parts} - {ACCUMULATION}, 1)
        changes: dict[str, Any] = {f"mesh.{axis}": 1 for axis in axes}
        changes["mesh.dcn"] = replace(self.config.mesh.dcn, **axes)
        if ACCUMULATION in parts:
            changes[ACCUMULATION] = 1
        return DividedStep(self.config.with_values(changes))

    def program(self, devices: Sequence[Device]) -> ConfiguredProgram:
        """Return the program of the step on the first of some devices."""
        num_tokens = (self.config.model.vocab_size or 0) - PADDING_IDS
        devices = devices[: math.prod(self.mesh.values())]
        return make_program(self.config, devices, num_tokens=num_tokens)
