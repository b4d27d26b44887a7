"""List the instructions that a compiled program executes, and how often.

The text for CPU and GPU contains trip counts. For TPU, this module computes trip counts
by running the loop's counter. A loop whose counter cannot be evaluated counts once and
is listed in `Module.unread`.

A scope in a branch of a conditional can state how often the branch is taken
(model/scopes.py). The branch counts that often, but at least once unless the scope
states zero. A branch without this scope always counts. XLA:GPU peels the first
iteration off a loop, and each branch of that iteration counts once.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator

from train.plan.compiled.collectives import KINDS
from train.plan.compiled.hlo import (
    Computation,
    Executed,
    Instruction,
    Loop,
    Module,
    is_loop_invariant,
    parse,
)
from train.plan.cost import taken_fraction

_MAX_TRIPS = 1_000_000
_FORWARDED = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}

# Returns a scalar's value: (number of a parameter, its tuple element or None) -> value.
Lookup = Callable[[int, int | None], int | None]


def read_module(text: str) -> Module:
    """Parse a module, and list its loops and executed instructions.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = parse(text)
    _list_executed(module.entry, 1, (), _unknown_scalar)
    module.unread += _collectives_not_executed(module)
    return module


def _collectives_not_executed(module: Module) -> Iterator[str]:
    """Describe collectives in computations that no executed instruction contains."""
    contained = (executed.instruction.with_nested for executed in module.executed)
    computations = {inner.computation for nested in contained for inner in nested}
    for computation in module.computations.values():
        for instruction in computation.order:
            is_collective = instruction.opcode.removesuffix("-start") in KINDS
            if is_collective and computation not in computations:
                yield f"{instruction.name}: no executed instruction contains it"


def _unknown_scalar(number: int, element: int | None) -> int | None:
    return None


def _list_executed(
    computation: Computation, count: int, loops: tuple[Loop, ...], lookup: Lookup
) -> None:
    """Append a computation's instructions, loops and calls to its module's lists."""
    module = computation.module
    for instruction in computation.order:
        module.executed.append(Executed(instruction, count, loops))
        if instruction.opcode == "while":
            loop = _read_loop(instruction, lookup)
            module.loops[loop.body.name] = loop
            initial = _initial_state(instruction, lookup)

            def invariant(number: int, element: int | None, loop=loop, initial=initial):
                if element is None or not is_loop_invariant(loop.body, element):
                    return None
                return initial(element)

            _list_executed(loop.body, count * loop.trips, (*loops, loop), invariant)
        elif instruction.opcode in ("call", "conditional"):
            for branch in instruction.called:
                branch_count = count
                if instruction.opcode == "conditional":
                    scopes = (inner.op_name for inner in branch.order)
                    fraction = taken_fraction(scopes, instruction.op_name)
                    if fraction is not None:
                        branch_count = max(int(fraction > 0), round(count * fraction))
                _list_executed(branch, branch_count, loops, _unknown_scalar)


def _read_loop(loop: Instruction, lookup: Lookup) -> Loop:
    stated_trips = loop.find(r'"known_trip_count":\{"n":"(\d+)"\}')
    trips = int(stated_trips) if stated_trips else _count_trips(loop, lookup)
    module = loop.computation.module
    if trips is None:
        module.unread.append(f"trip count of {loop.name}: counted as 1")
        trips = 1
    prefixes = Counter(
        inner.op_name.rpartition("/body/")[0]
        for inner in loop.body.order
        if "/body/" in inner.op_name
    )
    most_frequent = prefixes.most_common(1)[0][0] if prefixes else ""
    return Loop(loop.body, loop.op_name or most_frequent, trips, loop)


def _initial_state(loop: Instruction, lookup: Lookup) -> Callable[[int], int | None]:
    """Return a function that evaluates an element of a loop's initial state."""
    (start,) = loop.operands

    def initial(element: int) -> int | None:
        if start.opcode != "tuple":
            return None
        return _evaluate(start.operands[element], lookup)

    return initial


def _count_trips(loop: Instruction, lookup: Lookup) -> int | None:
    """Count the trips of a loop by running its counter, or None if it is unknown."""
    computations = loop.computation.module.computations
    condition = computations[loop.find(r" condition=%([\w.-]+)")]
    root, initial = loop.body.root, _initial_state(loop, lookup)
    state = dict[int, int | None]()

    def element_of(number: int, element: int | None) -> int | None:
        if element is None:
            return None
        if element not in state:
            state[element] = initial(element)
        return state[element]

    for trips in range(_MAX_TRIPS):
        continues = _evaluate(condition.root, element_of)
        if not continues:
            return None if continues is None else trips
        if root.opcode != "tuple":
            return None
        state |= {
            element: _evaluate(root.operands[element], element_of)
            for element in list(state)
        }
    return None


def _evaluate(instruction: Instruction, lookup: Lookup) -> int | None:
    """Return the value of an integer scalar, or None if it is unknown."""
    opcode, arguments = instruction.opcode, instruction.arguments
    if opcode == "constant":
        return int(arguments) if re.fullmatch(r"-?\d+", arguments) else None
    if opcode == "parameter":
        return lookup(int(arguments), None)
    operands = instruction.operands
    if opcode == "get-tuple-element":
        (source,), index = operands, instruction.index
        if source.opcode == "parameter":
            return lookup(int(source.arguments), index)
        if source.opcode != "tuple":
            return None
        return _evaluate(source.operands[index], lookup)
    if opcode in _FORWARDED:
        return _evaluate(operands[0], lookup)
    if opcode == "fusion":
        return _evaluate(
            instruction.called[0].root,
            lambda number, _: _evaluate(operands[number], lookup),
        )
    if opcode in _ARITHMETIC or opcode == "compare":
        a, b = (_evaluate(operand, lookup) for operand in operands)
        if a is None or b is None:
            return None
        if opcode == "compare":
            return _COMPARISONS[instruction.find(r" direction=(\w\w)")](a, b)
        return _ARITHMETIC[opcode](a, b)
    return None
