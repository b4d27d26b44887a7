"""The operations of a walked program: equations and loops."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from train.plan.estimated.arrays import LocalArray, OperationPosition

# Operations that only change the dtype, shape or sharding.
SHAPES = {
    *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
    *("expand_dims", "copy", "reduce_precision", "sharding_constraint"),
}


@dataclass(eq=False)
class Operation:
    """An equation, or a loop whose `body` runs `trips` times.

    flops: the FLOPs of a product or a kernel, including skipped blocks.
    computed_fraction: the fraction of `flops` in blocks that are not skipped.
    is_square: whether an attention kernel has as many keys as queries.
    slices: the slices of stacked arrays that a trip of a loop reads.
    carried: the arrays that a loop carries from trip to trip.
    stacked: the results of a trip that a loop stacks.
    """

    name: str
    operands: list[LocalArray]
    results: list[LocalArray]
    position: OperationPosition
    flops: float = 0.0
    computed_fraction: float = 1.0
    is_square: bool = True
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
