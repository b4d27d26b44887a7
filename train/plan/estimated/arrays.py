"""The arrays and operations of one device, and the layouts of reshaped arrays.

The dims of constants have the size of the traced program, and their local size is not
known. A result of constants and other arrays is laid out like the other arrays.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from train.core.shards import num_shards
from train.plan.sections import scope_in_name, section_of

Axes = tuple[str, ...]


class Dim(NamedTuple):
    """The local size of a dim, the axes that shard it, and whether both are known."""

    size: int
    axes: Axes = ()
    is_known: bool = True

    def reshard(self, axes: Axes, sizes: Mapping[str, int]) -> "Dim":
        """Return this dim sharded over other axes of a mesh with the given sizes."""
        size = self.size * num_shards(sizes, self.axes)
        return self._replace(size=-(-size // num_shards(sizes, axes)), axes=axes)


class StepPosition(NamedTuple):
    """How often an operation runs in a step, and the names of all scopes around it."""

    count: float
    scope: str

    @property
    def section(self) -> str:
        """The section of the step (train/plan/sections.py)."""
        return section_of(scope_in_name(self.scope))

    @property
    def in_layers(self) -> bool:
        """Whether the operation is in the loop over layers (model/gpt.py's scope)."""
        return "layers" in self.scope

    @property
    def is_backward(self) -> bool:
        """Whether the operation computes gradients, and does not rematerialise."""
        is_recomputed = "rematted_computation" in self.scope
        return "transpose(" in self.scope and not is_recomputed  # names of JAX


@dataclass(eq=False)
class PartialSum:
    """An array that must be summed over the devices along `axes`.

    is_product: whether a product of matrices made it.
    is_activation: whether it is the product of an activation and a parameter.
    """

    axes: Axes
    bytes: int
    position: StepPosition
    is_product: bool
    is_activation: bool
    is_reduced: bool = False


@dataclass(eq=False)
class LocalArray:
    """A device's part of an array.

    from_batch: whether the array depends on the batch, not on parameters alone.
    sums: the partial sums that the array contains; some may be reduced already.
    value: the elements of a constant of eight-bit integers, such as the blocks of
        scores that an attention kernel does not skip; None for other arrays.
    origin: the array of which this is a converted, reshaped or gathered copy.
    """

    dims: tuple[Dim, ...]
    itemsize: int
    from_batch: bool = False
    sums: tuple[PartialSum, ...] = ()
    on_host: bool = False
    value: np.ndarray | None = None
    origin: "LocalArray" = field(init=False)

    def __post_init__(self):
        self.origin = self
        self.size = math.prod(dim.size for dim in self.dims)
        self.bytes = self.size * self.itemsize

    @property
    def axes(self) -> Axes:
        """All mesh axes that shard the array."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def with_dims(self, dims: Iterable[Dim]) -> "LocalArray":
        """Return this array with other dims, gathered for example."""
        result = replace(self, dims=tuple(dims))
        # Activations are saved before and after, but a parameter is one of the state.
        result.origin = result if self.from_batch else self.origin
        return result


class Work(NamedTuple):
    """The FLOPs of a product or a kernel.

    flops: all FLOPs, including those of blocks that a kernel skips.
    computed: the fraction of `flops` in blocks that a kernel does not skip.
    dims: the numbers of rows, columns and contracted elements of a product.
    """

    flops: float
    computed: float = 1.0
    dims: tuple[int, int, int] = (1, 1, 1)


def product_work(rows: int, columns: int, depth: int, batch: int = 1) -> Work:
    """Return the work of `batch` products [rows, depth] x [depth, columns]."""
    return Work(2.0 * batch * rows * columns * depth, dims=(rows, columns, depth))


@dataclass(eq=False)
class Operation:
    """An equation, or a loop whose `body` runs `trips` times.

    work: the FLOPs of a product or a kernel; None for other operations.
    stacked: the results of a trip that a loop stacks.
    """

    name: str
    operands: list[LocalArray]
    results: list[LocalArray]
    position: StepPosition
    work: Work | None = None
    trips: int = 1
    body: list["Operation"] = field(default_factory=list)
    stacked: list[LocalArray] = field(default_factory=list)


def flatten_loops(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations and, recursively, the operations in the bodies of loops."""
    for operation in operations:
        yield operation
        yield from flatten_loops(operation.body)


def broadcast_dims(
    shape: Sequence[int], operands: Iterable[tuple[LocalArray, Sequence[int]]]
) -> tuple[Dim, ...]:
    """Return the dims of an elementwise result, preferring operands from the batch.

    Shapes are those of the traced program. Operands of another rank are ignored.
    """
    pairs = [pair for pair in operands if len(pair[1]) == len(shape)]
    # XLA slices an operand that fewer axes shard, or scatters a partial sum.
    pairs.sort(key=lambda pair: (not pair[0].from_batch, -len(pair[0].axes)))
    if pairs and pairs[0][1] == shape and all(dim.is_known for dim in pairs[0][0].dims):
        return pairs[0][0].dims
    dims = list[Dim]()
    used = set[str]()
    for i, size in enumerate(shape):
        matches = (array.dims[i] for array, traced in pairs if traced[i] == size)
        dim = next((d for d in matches if d.is_known), Dim(size, (), False))
        dims.append(dim._replace(axes=tuple(a for a in dim.axes if a not in used)))
        used.update(dim.axes)
    return tuple(dims)


def reshape_dims(
    dims: Sequence[Dim], before: Sequence[int], after: Sequence[int]
) -> tuple[Dim, ...]:
    """Return reshaped dims; the first dim of a merged or split group has all axes."""
    result = list[Dim]()
    i = 0
    j = 0
    while j < len(after):
        old_size, new_size = (before[i], after[j]) if i < len(before) else (1, after[j])
        old_start = i
        new_start = j
        i = min(i + 1, len(before))
        j = j + 1
        while old_size != new_size:
            if old_size < new_size:
                old_size = old_size * before[i]
                i = i + 1
            else:
                new_size = new_size * after[j]
                j = j + 1
        group = dims[old_start:i]
        others = after[new_start + 1 : j]
        size = max(1, math.prod(dim.size for dim in group) // math.prod(others))
        axes = tuple(axis for dim in group for axis in dim.axes)
        is_known = all(dim.is_known for dim in group)
        result += [Dim(size, axes, is_known), *(Dim(n, (), is_known) for n in others)]
    return tuple(result)
