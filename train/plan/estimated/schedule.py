"""The passes over memory that a loop's body takes, and what exists at once.

XLA fuses what is done element by element into what uses it: only what products and
kernels read and write lies in memory, and what is smaller than all that it is made of.
Arrays are made in the order of the program, as late as possible, and live to their last
use.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from train.plan.estimated.arrays import LocalArray
from train.plan.estimated.operation import SHAPES, Operation

_OPAQUE = (
    *("dot_general", "ragged_dot_general", "pallas_call", "scan"),
    *("gather", "scatter-add"),
)
_MUCH = 8  # times larger is what had better not wait for its last use
_MOST_READ = 4  # arrays that are combined in one pass


@dataclass(eq=False)
class Pass:
    """One pass over memory: what it reads, and what it writes."""

    reads: list[LocalArray]
    writes: list[LocalArray]
    operation: Operation | None = None  # None: element by element


class OperationSchedule:
    """The passes of a loop's body, in order; `results` hold what it hands on.

    Arguments and constants lie in memory already.
    """

    def __init__(self, loop: Operation, transposes: bool):
        """Order a loop's body; kernels may want their operands' dims in its order."""
        self.transposes, self.passes = transposes, list[Pass]()
        # Maps each array that is not in memory to the arrays in memory that make it.
        self._made_of: dict[LocalArray, list[LocalArray]] = {}
        self._products: dict[LocalArray, Pass] = {}  # products with unused results
        # The array that has an array's bytes, and whether in the same order.
        self._same: dict[LocalArray, tuple[LocalArray, bool]] = {}
        for operation in loop.body:
            self._add(operation)
        self.results = [self._write(a) for a in (*loop.carried, *loop.stacked)]

    def peak(self, size: Callable[[LocalArray], int]) -> int:
        """Return the most bytes that exist at once, by an array's size.

        What is not made here is there from its first use on.
        """
        uses = dict[LocalArray, list[int]]()
        for number, one in enumerate(self.passes):
            for array in (*one.reads, *one.writes):
                uses.setdefault(array, []).append(number)
        change = [0] * (len(self.passes) + 1)
        for array, numbers in uses.items():
            change[numbers[0]] += size(array)
            change[numbers[-1] + 1] -= size(array)
        return max(itertools.accumulate(change))

    def _add(self, operation: Operation) -> None:
        is_sum = operation.name == "dot_general" and not operation.flops
        if operation.name in _OPAQUE and not is_sum:
            self._run(operation)
            return
        behind = (self._made_of.get(a, [a]) for a in operation.operands)
        of = list(dict.fromkeys(itertools.chain.from_iterable(behind)))
        adds = operation.name in ("add", "add_any")
        if adds and self._add_to_product(operation.results[0], of):
            return
        for array in operation.results:
            self._made_of[array] = of
            if operation.name in SHAPES and array.bytes == operation.operands[0].bytes:
                first = operation.operands[0]
                held, in_order = self._same.get(first, (first, True))
                self._same[array] = held, in_order and operation.name != "transpose"
            large = [a for a in of if 2 * a.bytes >= array.bytes]
            small = _MUCH * array.bytes <= sum(a.bytes for a in of)
            if small or len(large) > _MOST_READ:
                self._write(array)

    def _write(self, array: LocalArray, ordered: bool = False) -> LocalArray:
        """Have an array in memory, in the order of its dims if asked for.

        Returns:
            The array that holds it.
        """
        held, in_order = self._same.get(array, (array, True))
        array = held if in_order or not ordered else array
        if array in self._made_of:
            of = self._made_of.pop(array)
            self._use(of)
            previous = self.passes[-1] if self.passes else None
            if previous and previous.operation is None and previous.reads == of:
                previous.writes.append(array)
            else:
                self.passes.append(Pass(of, [array]))
        self._use([array])
        return array

    def _run(self, operation: Operation) -> None:
        """Make a pass of its own for a product, a kernel or a loop."""
        ordered = operation.is_kernel and self.transposes
        reads = [self._write(a, ordered) for a in dict.fromkeys(operation.operands)]
        self._use(reads)
        self.passes.append(Pass(reads, list(operation.results), operation))
        if operation.flops and not operation.is_kernel:
            self._products[operation.results[0]] = self.passes[-1]

    def _use(self, arrays: Iterable[LocalArray]) -> None:
        for array in arrays:
            self._products.pop(array, None)

    def _add_to_product(self, array: LocalArray, terms: list[LocalArray]) -> bool:
        """Have a sum in memory, if the product that made its last term can add up."""
        last = [term for term in self._products if term in terms]
        known = [term for term in terms if all(dim.known for dim in term.dims)]
        if not last or any(term.size != array.size for term in known):
            return False
        one = self._products.pop(last[-1])
        others = [term for term in terms if term is not last[-1]]
        self._use(others)
        if not any(term.from_batch for term in others):
            one.reads.append(array)  # a running sum
        one.writes[:] = [array]
        self._products[array] = one
        return True
