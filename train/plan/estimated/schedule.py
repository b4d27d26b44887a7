"""When a device makes each array of a loop's body or of an update, and what that moves.

XLA fuses what is done element by element into what uses it: only what products and
kernels read and write lies in memory, and what is smaller than all that it is made of.
Arrays are made in the order of the program, as late as possible, and live to their last
use.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from train.plan.estimated.arrays import Array
from train.plan.estimated.operation import SHAPES, Operation

_OPAQUE = ("dot_general", "pallas_call", "scan", "gather", "scatter-add")
_ADDS = ("add", "add_any")
_MUCH = 8  # times larger is what had better not wait for its last use
_MOST_READ = 4  # arrays that are combined in one pass


@dataclass(eq=False)
class Pass:
    """One pass over memory: what it reads, and what it writes."""

    reads: list[Array]
    writes: list[Array]
    operation: Operation | None = None  # None: element by element


@dataclass
class Schedule:
    """The passes of a list of operations, in order.

    first, last: the number of the first and of the last pass that uses an array.
    results: what holds those that were asked for.
    """

    passes: list[Pass] = field(default_factory=list)
    first: dict[Array, int] = field(default_factory=dict)
    last: dict[Array, int] = field(default_factory=dict)
    results: list[Array] = field(default_factory=list)

    def peak(self, size: Callable[[Array], int]) -> int:
        """Return the most bytes that exist at once, by an array's size.

        What is not made here is there from its first use on.
        """
        born = dict(self.first)
        for number, one in enumerate(self.passes):
            born.update(dict.fromkeys(one.writes, number))
        change = [0] * (len(self.passes) + 2)
        for array, number in born.items():
            change[number] += size(array)
            change[self.last.get(array, number) + 1] -= size(array)
        return max(itertools.accumulate(change))


def schedule(
    operations: Iterable[Operation], results: Iterable[Array], transposes: bool = True
) -> Schedule:
    """Order what is made; arguments and constants lie in memory already.

    Args:
        operations: in the program's order.
        results: that somebody needs afterwards.
        transposes: whether kernels want their operands' dims in the program's order.
    """
    plan = Schedule()
    made_of = dict[Array, list[Array]]()  # of what is not in memory
    products = dict[Array, Pass]()  # results that are not used yet
    same = dict[Array, tuple[Array, bool]]()  # as bytes; whether in the same order

    def sources(array: Array) -> list[Array]:
        return made_of.get(array, [array])

    def use(arrays: Iterable[Array]) -> None:
        for array in arrays:
            plan.first.setdefault(array, len(plan.passes))
            plan.last[array] = len(plan.passes)
            products.pop(array, None)

    def write(array: Array, ordered: bool = False) -> Array:
        """Have an array in memory, its dims in order if asked for; what holds it."""
        held, in_order = same.get(array, (array, True))
        array = held if in_order or not ordered else array
        if array in made_of:
            of = made_of.pop(array)
            use(of)
            previous = plan.passes[-1] if plan.passes else None
            if previous and previous.operation is None and previous.reads == of:
                previous.writes.append(array)
            else:
                plan.passes.append(Pass(of, [array]))
        use([array])
        return array

    def add_to_product(array: Array, terms: list[Array]) -> bool:
        """Have a sum in memory, if the product that made its last term can add up."""
        last = [term for term in products if term in terms]
        if not last or any(term.size != array.size for term in terms):
            return False
        one = products.pop(last[-1])
        use(term for term in terms if term is not last[-1])
        one.writes[:] = [array]
        products[array] = one
        return True

    for operation in operations:
        operands = dict.fromkeys(operation.operands)
        if operation.name in _OPAQUE and not _is_sum(operation):
            reads = [
                write(array, operation.is_kernel and transposes) for array in operands
            ]
            use(reads)
            one = Pass(reads, list(operation.results), operation)
            plan.passes.append(one)
            if operation.flops and not operation.is_kernel:
                products[operation.results[0]] = one
            continue
        of = list(dict.fromkeys(a for array in operands for a in sources(array)))
        if operation.name in _ADDS and add_to_product(operation.results[0], of):
            continue
        for array in operation.results:
            made_of[array] = of
            if operation.name in SHAPES and array.bytes == operation.operands[0].bytes:
                first = operation.operands[0]
                held, in_order = same.get(first, (first, True))
                same[array] = held, in_order and operation.name != "transpose"
            large = [a for a in of if 2 * a.bytes >= array.bytes]
            small = _MUCH * array.bytes <= sum(a.bytes for a in of)
            if small or len(large) > _MOST_READ:
                write(array)
    plan.results = [write(array) for array in results]
    return plan


def _is_sum(operation: Operation) -> bool:
    return operation.name == "dot_general" and not operation.flops
