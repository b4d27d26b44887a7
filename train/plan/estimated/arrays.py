"""The local part of an array, and how shape operations lay out their results.

The dims of constants have the size of the traced program, and their local size is not
known. A result of constants and other arrays is laid out like the other arrays.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train.mesh_sizes import num_shards
from train.plan.sections import scope_in_name, section_of

Axes = tuple[str, ...]


class Dim(NamedTuple):
    """The local size of a dim, the axes that shard it, and whether both are known."""

    size: int
    axes: Axes = ()
    is_known: bool = True


class OperationPosition(NamedTuple):
    """How often an operation runs, its scope, and the id of the loop body around it."""

    count: int
    scope: str
    body: int

    @property
    def in_layers(self) -> bool:
        """Whether the operation is in the loop over layers (model/gpt.py's scope)."""
        return "layers" in self.scope

    @property
    def section(self) -> str:
        """The section of the step (train/plan/sections.py)."""
        return section_of(scope_in_name(self.scope))

    @property
    def in_stages(self) -> bool:
        """Whether the operation is in a pipeline's loop, but outside the layers."""
        return "stages" in self.scope and not self.in_layers

    @property
    def is_recomputed(self) -> bool:
        """Whether the operation is rematerialisation, which JAX names in the scope."""
        return "rematted_computation" in self.scope

    @property
    def is_backward(self) -> bool:
        """Whether the operation is in a backward pass, which JAX calls a transpose."""
        return "transpose(" in self.scope and not self.is_recomputed


@dataclass(eq=False)
class PartialSum:
    """An array that must be summed over the devices along `axes`."""

    axes: Axes
    bytes: int
    position: OperationPosition
    is_product: bool
    is_reduced: bool = False


@dataclass(eq=False)
class LocalArray:
    """A device's part of an array.

    from_batch: whether the array depends on the batch, not on parameters alone.
    sums: the partial sums that the array contains; some may be reduced already.
    made_from: the parameter that the array is a converted or reshaped copy of.
    label: the name of the parameter or batch field, for printing.
    on_host: whether the array is in host memory.
    value: the elements of a constant of eight-bit integers, such as the blocks of
        scores that an attention kernel does not skip; None for other arrays.
    """

    dims: tuple[Dim, ...]
    itemsize: int
    from_batch: bool = False
    sums: tuple[PartialSum, ...] = ()
    made_from: "LocalArray | None" = None
    label: str = ""
    on_host: bool = False
    value: np.ndarray | None = None

    def __post_init__(self):
        self.source = self.made_from or self
        self.size = math.prod(dim.size for dim in self.dims)
        self.bytes = self.size * self.itemsize

    @property
    def axes(self) -> Axes:
        """All mesh axes that shard the array."""
        return tuple(axis for dim in self.dims for axis in dim.axes)


def gather_along(
    array: LocalArray, axes: Iterable[str], sizes: Mapping[str, int]
) -> LocalArray:
    """Return an array gathered along some axes."""
    dims = []
    for dim in array.dims:
        removed = [axis for axis in dim.axes if axis in axes]
        remaining = tuple(axis for axis in dim.axes if axis not in axes)
        dims.append(Dim(dim.size * num_shards(sizes, removed), remaining, dim.is_known))
    from_batch, source = array.from_batch, array.source
    return LocalArray(tuple(dims), array.itemsize, from_batch, made_from=source)


def broadcast_dims(
    shape: Sequence[int], operands: Iterable[tuple[LocalArray, Sequence[int]]]
) -> tuple[Dim, ...]:
    """Return the dims of an elementwise result, preferring operands from the batch.

    Args:
        shape: the traced shape of the result.
        operands: arrays with their traced shapes; arrays of another rank are ignored.
    """
    pairs = [pair for pair in operands if len(pair[1]) == len(shape)]
    pairs.sort(key=lambda pair: not pair[0].from_batch)
    if pairs and pairs[0][1] == shape and all(dim.is_known for dim in pairs[0][0].dims):
        return pairs[0][0].dims
    dims, used = list[Dim](), set[str]()
    for i, size in enumerate(shape):
        matches = (array.dims[i] for array, traced in pairs if traced[i] == size)
        dim = next((d for d in matches if d.is_known), Dim(size, (), False))
        axes = tuple(axis for axis in dim.axes if axis not in used)
        used.update(axes)
        dims.append(dim._replace(axes=axes))
    return tuple(dims)


def resize_dim(dim: Dim, before: int, after: int) -> Dim:
    """Return a padded or sliced dim, given the traced sizes before and after."""
    if before == after:
        return dim
    if dim.axes or not dim.is_known:
        return Dim(after, (), False)
    return Dim(dim.size * after // before)


def reshape_dims(
    dims: Sequence[Dim], before: Sequence[int], after: Sequence[int]
) -> tuple[Dim, ...]:
    """Return reshaped dims; the first dim of a merged or split group has all axes."""
    result, i, j = list[Dim](), 0, 0
    while j < len(after):
        old_size, new_size = (before[i], after[j]) if i < len(before) else (1, after[j])
        old_start, new_start = i, j
        i, j = min(i + 1, len(before)), j + 1
        while old_size != new_size:
            if old_size < new_size:
                old_size, i = old_size * before[i], i + 1
            else:
                new_size, j = new_size * after[j], j + 1
        group, others = dims[old_start:i], after[new_start + 1 : j]
        size = max(1, math.prod(dim.size for dim in group) // math.prod(others))
        axes = tuple(axis for dim in group for axis in dim.axes)
        is_known = all(dim.is_known for dim in group)
        result += [Dim(size, axes, is_known), *(Dim(n, (), is_known) for n in others)]
    return tuple(result)
