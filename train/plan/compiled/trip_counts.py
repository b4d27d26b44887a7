"""What a compiled program executes, and how often.

Trip counts stand in the text for CPU and GPU; for TPU they are found by running the
loop's counter: its start, its step and the condition. A loop whose counter cannot be
read counts once and is listed in `Module.unread`. A branch of a conditional counts as
often as a scope in it says that it is taken (model/parts.py), at least once if ever; or
else always. GPUs run a first iteration outside of its loop: its branches all count.
"""

import re
from collections import Counter
from collections.abc import Callable

from train.plan.compiled.hlo import (
    Computation,
    Executed,
    Instruction,
    Loop,
    Module,
    is_loop_invariant,
    parse,
)
from train.plan.cost import taken_part

_MOST_TRIPS = 1_000_000
_FORWARDED = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "and": lambda a, b: a & b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}

# The value of a computation's parameter: (its number, its element or None) -> value.
Values = Callable[[int, int | None], int | None]


def read_module(text: str) -> Module:
    """Read a module with what it executes.

    Raises:
        ValueError: if the text is not that of an HLO module.
    """
    module = parse(text)
    _run(module.entry, 1, (), lambda number, element: None)
    return module


def _run(
    computation: Computation, times: int, loops: tuple[Loop, ...], values: Values
) -> None:
    """List what a computation executes, loops and calls included."""
    module = computation.module
    for instruction in computation.order:
        module.executed.append(Executed(instruction, times, loops))
        if instruction.opcode == "while":
            loop = _loop(instruction, values)
            module.loops[loop.body.name] = loop
            before = _before(instruction, values)

            def invariant(number: int, element: int | None, loop=loop, before=before):
                if element is None or not is_loop_invariant(loop.body, element):
                    return None
                return before(element)

            _run(loop.body, times * loop.trips, (*loops, loop), invariant)
        elif instruction.opcode in ("call", "conditional"):
            for called in instruction.called:
                scopes = (i.op_name for i in called.order)
                conditional, own = instruction.opcode != "call", instruction.op_name
                part = taken_part(scopes, own) if conditional else None
                least = 1 if part else 0
                often = times if part is None else max(least, round(times * part))
                _run(called, often, loops, lambda number, element: None)


def _loop(loop: Instruction, values: Values) -> Loop:
    known = loop.find(r'"known_trip_count":\{"n":"(\d+)"\}')
    trips = int(known) if known else _trips(loop, values)
    if trips is None:
        loop.computation.module.unread.append(
            f"trip count of {loop.name}: counted as 1"
        )
        trips = 1
    starts = Counter(
        i.op_name.rpartition("/body/")[0]
        for i in loop.body.order
        if "/body/" in i.op_name
    )
    usual = starts.most_common(1)[0][0] if starts else ""
    return Loop(loop.body, loop.op_name or usual, trips, loop)


def _before(loop: Instruction, values: Values) -> Callable[[int], int | None]:
    """Return the elements of a loop's state as they are when it starts."""
    (start,) = loop.operands

    def before(element: int) -> int | None:
        known = start.opcode == "tuple"
        return _evaluate(start.operands[element], values) if known else None

    return before


def _trips(loop: Instruction, values: Values) -> int | None:
    """Count the trips of a loop by running its counter, None if that cannot be read."""
    condition = loop.computation.module.computations[
        loop.find(r" condition=%([\w.-]+)")
    ]
    root, before = loop.body.root, _before(loop, values)
    state = dict[int, int | None]()

    def element_of(number: int, element: int | None) -> int | None:
        if element is None:
            return None
        if element not in state:
            state[element] = before(element)
        return state[element]

    for trips in range(_MOST_TRIPS):
        goes_on = _evaluate(condition.root, element_of)
        if not goes_on:
            return None if goes_on is None else trips
        if root.opcode != "tuple":
            return None
        made = root.operands
        state |= {element: _evaluate(made[element], element_of) for element in [*state]}
    return None


def _evaluate(instruction: Instruction, values: Values) -> int | None:
    """Return the value of an integer scalar, None if it is not known."""
    opcode, arguments = instruction.opcode, instruction.arguments
    if opcode == "constant":
        return int(arguments) if re.fullmatch(r"-?\d+", arguments) else None
    if opcode == "parameter":
        return values(int(arguments), None)
    operands = instruction.operands
    if opcode == "get-tuple-element":
        (source,), index = operands, instruction.index
        if source.opcode == "parameter":
            return values(int(source.arguments), index)
        known = source.opcode == "tuple"
        return _evaluate(source.operands[index], values) if known else None
    if opcode in _FORWARDED:
        return _evaluate(operands[0], values)
    if opcode == "fusion":
        return _evaluate(
            instruction.called[0].root,
            lambda number, _: _evaluate(operands[number], values),
        )
    if opcode in _ARITHMETIC or opcode == "compare":
        a, b = (_evaluate(operand, values) for operand in operands)
        if a is None or b is None:
            return None
        if opcode == "compare":
            return _COMPARISONS[instruction.find(r" direction=(\w\w)")](a, b)
        return _ARITHMETIC[opcode](a, b)
    return None
