"""Read the weights of each expert from tensors that hold those of all experts.

Some published models store each expert's matrices as tensors of their own. Files of the
same models may also hold all experts of a layer in two tensors:
`experts.gate_up_proj`, [E, 2 F, D] with the gates first, and `experts.down_proj`,
[E, D, F]. Shapes: E experts, F hidden values of an expert, D embed.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A tensor as a part of a stored tensor.

    shape: the shape of the part.
    expert: the index of the expert in the stored tensor's first dim, which the part
        does not have; None if the part is the whole stored tensor.
    first_row: the index of the part's first row among the rows of its expert.
    """

    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0

    def select(self, slices: Sequence[slice]) -> tuple[slice, ...]:
        """Translate slices of this part to slices of the stored tensor.

        For a part with an expert, they have one dim more, of size 1.
        """
        if self.expert is None:
            return tuple(slices)
        start, stop, _ = slices[0].indices(self.shape[0])
        rows = slice(self.first_row + start, self.first_row + stop)
        return slice(self.expert, self.expert + 1), rows, *slices[1:]


def parts_of_experts(name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """Return the parts of a stored tensor by the names of each expert's own tensors.

    The result is empty if the tensor does not hold the weights of all experts.
    """
    prefix, _, projections = name.rpartition(".")
    if not prefix.endswith(".mlp.experts") or len(shape) != 3:
        return {}
    names = projections.removesuffix("_proj").split("_")  # [gate, up] or [down]
    num_experts, num_rows, num_columns = shape
    size = num_rows // len(names)
    return {
        f"{prefix}.{expert}.{projection}_proj.weight": Part(
            (size, num_columns), expert, first_row=number * size
        )
        for expert in range(num_experts)
        for number, projection in enumerate(names)
    }
