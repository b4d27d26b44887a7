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
    scheduler = _Scheduler(transposes)
    for operation in operations:
        scheduler.add(operation)
    scheduler.plan.results = [scheduler.write(array) for array in results]
    return scheduler.plan


class _Scheduler:
    """What is known after some of the operations.

    made_of: of each array that is not in memory, the arrays in memory behind it.
    products: the passes of products whose results nothing has used yet.
    same: the array that has an array's bytes, and whether in the same order.
    """

    def __init__(self, transposes: bool):
        self.plan, self.transposes = Schedule(), transposes
        self.made_of: dict[Array, list[Array]] = {}
        self.products: dict[Array, Pass] = {}
        self.same: dict[Array, tuple[Array, bool]] = {}

    def add(self, operation: Operation) -> None:
        """Take the next operation in."""
        if operation.name in _OPAQUE and not _is_sum(operation):
            self._run(operation)
            return
        operands = dict.fromkeys(operation.operands)
        of = [a for array in operands for a in self.made_of.get(array, [array])]
        of = list(dict.fromkeys(of))
        if operation.name in _ADDS and self._add_to_product(operation.results[0], of):
            return
        for array in operation.results:
            self.made_of[array] = of
            if operation.name in SHAPES and array.bytes == operation.operands[0].bytes:
                first = operation.operands[0]
                held, in_order = self.same.get(first, (first, True))
                self.same[array] = held, in_order and operation.name != "transpose"
            large = [a for a in of if 2 * a.bytes >= array.bytes]
            small = _MUCH * array.bytes <= sum(a.bytes for a in of)
            if small or len(large) > _MOST_READ:
                self.write(array)

    def write(self, array: Array, ordered: bool = False) -> Array:
        """Have an array in memory, in the order of its dims if asked for.

        Returns:
            The array that holds it.
        """
        held, in_order = self.same.get(array, (array, True))
        array = held if in_order or not ordered else array
        if array in self.made_of:
            of = self.made_of.pop(array)
            self._use(of)
            previous = self.plan.passes[-1] if self.plan.passes else None
            if previous and previous.operation is None and previous.reads == of:
                previous.writes.append(array)
            else:
                self.plan.passes.append(Pass(of, [array]))
        self._use([array])
        return array

    def _run(self, operation: Operation) -> None:
        """Make a pass of its own for a product, a kernel or a loop."""
        ordered = operation.is_kernel and self.transposes
        reads = [self.write(a, ordered) for a in dict.fromkeys(operation.operands)]
        self._use(reads)
        one = Pass(reads, list(operation.results), operation)
        self.plan.passes.append(one)
        if operation.flops and not operation.is_kernel:
            self.products[operation.results[0]] = one

    def _use(self, arrays: Iterable[Array]) -> None:
        number = len(self.plan.passes)
        for array in arrays:
            self.plan.first.setdefault(array, number)
            self.plan.last[array] = number
            self.products.pop(array, None)

    def _add_to_product(self, array: Array, terms: list[Array]) -> bool:
        """Have a sum in memory, if the product that made its last term can add up."""
        last = [term for term in self.products if term in terms]
        if not last or any(term.size != array.size for term in terms):
            return False
        one = self.products.pop(last[-1])
        self._use(term for term in terms if term is not last[-1])
        one.writes[:] = [array]
        self.products[array] = one
        return True


def _is_sum(operation: Operation) -> bool:
    return operation.name == "dot_general" and not operation.flops
