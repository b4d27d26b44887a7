"""The operations of a walked program: one equation, or a loop of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from train.plan.estimated.arrays import LocalArray, OperationPosition

# Same values in another dtype or shape.
SHAPES = {
    *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
    *("expand_dims", "copy", "reduce_precision", "sharding_constraint"),
}


@dataclass(eq=False)
class Operation:
    """An equation; or a loop, whose `body` runs `trips` times.

    flops: of a product or a kernel, of which `part` are computed.
    square: whether a kernel of attention has as many keys as queries.
    slices: what a loop takes of stacked arrays; carried: what it hands from trip to
        trip; stacked: what it keeps of each.
    """

    name: str
    operands: list[LocalArray]
    results: list[LocalArray]
    place: OperationPosition
    flops: float = 0.0
    part: float = 1.0
    square: bool = True
    trips: int = 1
    body: list["Operation"] = field(default_factory=list)
    slices: list[LocalArray] = field(default_factory=list)
    carried: list[LocalArray] = field(default_factory=list)
    stacked: list[LocalArray] = field(default_factory=list)

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, not XLA's own."""
        return self.name == "pallas_call"


def each(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Return operations, and what the loops among them hold, loops in there too."""
    for operation in operations:
        yield operation
        yield from each(operation.body)
