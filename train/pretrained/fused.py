"""Experts that a published folder holds in one tensor.

A family that stores each expert in tensors of its own reads such a folder too: each
expert's matrices are parts of `experts.gate_up_proj`, [E, 2 F, D] with the gates first,
and of `experts.down_proj`, [E, D, F].
"""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A part of a stored tensor.

    shape: the shape of the part.
    expert: the index into the first dim, which the part lacks; None for a whole tensor.
    first: the index of the first row.
    """

    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0

    def select(self, slices: Sequence[slice]) -> tuple[slice, ...]:
        """Return the slices of the stored tensor for slices of this part."""
        if self.expert is None:
            return tuple(slices)
        start, stop, _ = slices[0].indices(self.shape[0])
        rows = slice(self.first + start, self.first + stop)
        return slice(self.expert, self.expert + 1), rows, *slices[1:]


def parts_of_experts(name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """Return the parts of a tensor of all experts by name, and otherwise nothing."""
    experts, _, projections = name.rpartition(".")
    if not experts.endswith(".mlp.experts") or len(shape) != 3:
        return {}
    names = projections.removesuffix("_proj").split("_")  # [gate, up] or [down]
    num_experts, num_rows, num_columns = shape
    size = num_rows // len(names)
    return {
        f"{experts}.{expert}.{part}_proj.weight": Part(
            (size, num_columns), expert, first=number * size
        )
        for expert in range(num_experts)
        for number, part in enumerate(names)
    }
