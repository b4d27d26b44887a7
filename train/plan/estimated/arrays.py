"""The local part of an array, and how it follows through an operation.

A dim knows its local size and the mesh axes that shard it. The result of constants
alone has the traced size; combined with another array it takes the size of that one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from train.mesh_sizes import num_shards

Axes = tuple[str, ...]


class Dim(NamedTuple):
    """Size of a device's part, the mesh axes that cut it, whether both are known."""

    size: int
    axes: Axes = ()
    known: bool = True


class OperationPosition(NamedTuple):
    """The position of an operation: how often it runs, its scopes, the loop's body."""

    times: int
    scope: str
    body: int

    @property
    def in_layers(self) -> bool:
        """Whether it is part of the loop over the layers (model/gpt.py's scope)."""
        return "layers" in self.scope

    @property
    def in_stages(self) -> bool:
        """Whether it is part of the loop of a pipeline, but not of a layer's."""
        return "stages" in self.scope and not self.in_layers

    @property
    def recomputed(self) -> bool:
        """Whether it repeats a forward pass; the name is jax's own."""
        return "rematted_computation" in self.scope

    @property
    def is_backward(self) -> bool:
        """Whether it is part of a backward pass, which jax calls a transpose."""
        return "transpose(" in self.scope and not self.recomputed


@dataclass(eq=False)
class PartialSum:
    """A sum of which devices along some axes have a part each, until it is reduced."""

    axes: Axes
    bytes: int
    place: OperationPosition
    is_product: bool
    reduced: bool = False


@dataclass(eq=False)
class LocalArray:
    """A device's part of an array.

    from_batch: whether it depends on the batch, not on parameters alone.
    sums: of which it is made; some may not be reduced yet.
    made_from: the parameter that it is but for dtype and shape; None: itself.
    label: what it serves, for people.
    on_host: whether it lies in host memory.
    """

    dims: tuple[Dim, ...]
    itemsize: int
    from_batch: bool = False
    sums: tuple[PartialSum, ...] = ()
    made_from: "LocalArray | None" = None
    label: str = ""
    on_host: bool = False

    def __post_init__(self):
        self.source = self.made_from or self
        self.size = math.prod(dim.size for dim in self.dims)
        self.bytes = self.size * self.itemsize

    @property
    def axes(self) -> Axes:
        """All mesh axes that cut it."""
        return tuple(axis for dim in self.dims for axis in dim.axes)


def uncut(
    array: LocalArray, axes: Iterable[str], sizes: Mapping[str, int]
) -> LocalArray:
    """Return an array that some axes do not cut any more."""
    dims = []
    for dim in array.dims:
        gone = [axis for axis in dim.axes if axis in axes]
        kept = tuple(axis for axis in dim.axes if axis not in axes)
        dims.append(Dim(dim.size * num_shards(sizes, gone), kept, dim.known))
    flag, source = array.from_batch, array.source
    return LocalArray(tuple(dims), array.itemsize, flag, made_from=source)


def broadcast_dims(
    shape: Sequence[int], operands: Iterable[tuple[LocalArray, Sequence[int]]]
) -> tuple[Dim, ...]:
    """Lay out what is made element by element: as operands made of the batch are.

    Args:
        shape: that was traced, of the result.
        operands: with the shapes that were traced; those of another rank are ignored.
    """
    order = [pair for pair in operands if len(pair[1]) == len(shape)]
    order.sort(key=lambda pair: not pair[0].from_batch)
    if order and order[0][1] == shape and all(dim.known for dim in order[0][0].dims):
        return order[0][0].dims
    dims, used = list[Dim](), set[str]()
    for i, size in enumerate(shape):
        same = (array.dims[i] for array, traced in order if traced[i] == size)
        dim = next((d for d in same if d.known), Dim(size, (), False))
        axes = tuple(axis for axis in dim.axes if axis not in used)
        used.update(axes)
        dims.append(dim._replace(axes=axes))
    return tuple(dims)


def resized(dim: Dim, before: int, after: int) -> Dim:
    """Lay out a dim that became longer or shorter, by the sizes that were traced."""
    if before == after:
        return dim
    if dim.axes or not dim.known:
        return Dim(after, (), False)
    return Dim(dim.size * after // before)


def reshaped(
    dims: Sequence[Dim], before: Sequence[int], after: Sequence[int]
) -> tuple[Dim, ...]:
    """Lay out a reshaped array: the first of several dims takes their axes."""
    result, i, j = list[Dim](), 0, 0
    while j < len(after):
        old, new = (before[i], after[j]) if i < len(before) else (1, after[j])
        start, first = i, j
        i, j = min(i + 1, len(before)), j + 1
        while old != new:
            if old < new:
                old, i = old * before[i], i + 1
            else:
                new, j = new * after[j], j + 1
        group, rest = dims[start:i], after[first + 1 : j]
        size = max(1, math.prod(dim.size for dim in group) // math.prod(rest))
        axes = tuple(axis for dim in group for axis in dim.axes)
        known = all(dim.known for dim in group)
        result += [Dim(size, axes, known), *(Dim(size, (), known) for size in rest)]
    return tuple(result)
