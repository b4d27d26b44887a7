"""The operations of a walked program: equations and loops."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from train.plan.estimated.arrays import LocalArray, OperationPosition

# Operations that only change the dtype, shape or sharding.
SHAPES = {
    *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
    *("expand_dims", "copy", "reduce_precision", "sharding_constraint"),
}


class ProductSize(NamedTuple):
    """The local size of a matrix product, [rows, depth] x [depth, columns].

    batch: the number of such products.
    """

    rows: int
    columns: int
    depth: int
    batch: int = 1

    @property
    def flops(self) -> float:
        """Two FLOPs for each multiply-add."""
        return 2.0 * math.prod(self)


@dataclass(eq=False)
class Operation:
    """An equation, or a loop whose `body` runs `trips` times.

    flops: the FLOPs of a product or a kernel, including skipped blocks.
    computed: the fraction of `flops` in blocks that a kernel does not skip.
    product: the size of a matrix product; None for other operations.
    slices: the slices of stacked arrays that a trip of a loop reads.
    carried: the arrays that a loop carries from trip to trip.
    stacked: the results of a trip that a loop stacks.
    """

    name: str
    operands: list[LocalArray]
    results: list[LocalArray]
    position: OperationPosition
    flops: float = 0.0
    computed: float = 1.0
    product: ProductSize | None = None
    trips: int = 1
    body: list["Operation"] = field(default_factory=list)
    slices: list[LocalArray] = field(default_factory=list)
    carried: list[LocalArray] = field(default_factory=list)
    stacked: list[LocalArray] = field(default_factory=list)

    @property
    def is_kernel(self) -> bool:
        """Whether the operation is a Pallas kernel."""
        return self.name == "pallas_call"


def flatten_loops(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations and, recursively, the operations in the bodies of loops."""
    for operation in operations:
        yield operation
        yield from flatten_loops(operation.body)
