"""What a compiled program executes, and how often.

Trip counts stand in the text for CPU and GPU; for TPU they are found by running the
loop's counter: its start, its step and the condition. A loop whose counter cannot be
read counts once and is listed in `Module.unread`. A branch of a conditional counts as
often as a scope in it says that it is taken (model/parts.py), but at least once; or
else always. GPUs run a first iteration outside of its loop: its branches all count.
"""

import re
from collections import Counter
from collections.abc import Callable

from train.plan.compiled.hlo import (
    BODY,
    Computation,
    Executed,
    Instruction,
    Loop,
    Module,
    index_of,
    is_kept,
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


def read(text: str) -> Module:
    """Read a module with what it executes.

    Raises:
        ValueError: if the text is not that of an HLO module.
    """
    module = parse(text)
    _run(module, module.entry, 1, (), lambda number, element: None)
    return module


def _run(
    module: Module,
    computation: Computation,
    times: int,
    loops: tuple[Loop, ...],
    values: Values,
) -> None:
    """List what a computation executes, loops and calls included."""
    for instruction in computation.instructions.values():
        module.executed.append(Executed(instruction, computation, times, loops))
        if instruction.opcode == "while":
            loop = _loop(module, instruction, computation, values)
            module.loops[loop.body] = loop
            body = module.computations[loop.body]
            before = _before(module, instruction, computation, values)

            def invariant(number: int, element: int | None, loop=loop, before=before):
                if element is None or not is_kept(module, loop.body, element):
                    return None
                return before(element)

            inner = (*loops, loop)
            _run(module, body, times * loop.trips, inner, invariant)
        elif instruction.opcode in ("call", "conditional"):
            for name in instruction.called:
                called = module.computations[name]
                scopes = (i.op_name for i in called.instructions.values())
                part = taken_part(scopes) if instruction.opcode != "call" else None
                often = times if part is None else max(1, round(times * part))
                _run(module, called, often, loops, lambda number, element: None)


def _loop(
    module: Module, loop: Instruction, computation: Computation, values: Values
) -> Loop:
    body = loop.find(BODY)
    known = loop.find(r'"known_trip_count":\{"n":"(\d+)"\}')
    trips = int(known) if known else _trips(module, loop, computation, values)
    if trips is None:
        module.unread.append(f"trip count of {loop.name}: counted as 1")
        trips = 1
    inside = module.computations[body].instructions.values()
    starts = Counter(
        i.op_name.rpartition("/body/")[0] for i in inside if "/body/" in i.op_name
    )
    usual = starts.most_common(1)[0][0] if starts else ""
    return Loop(body, loop.op_name or usual, trips, loop, computation)


def _before(
    module: Module, loop: Instruction, computation: Computation, values: Values
) -> Callable[[int], int | None]:
    """Give the elements of a loop's state as they are when it starts."""
    (start,) = computation.operands(loop)

    def before(element: int) -> int | None:
        if start.opcode != "tuple":
            return None
        made = computation.operands(start)[element]
        return _evaluate(module, made, computation, values)

    return before


def _trips(
    module: Module, loop: Instruction, computation: Computation, values: Values
) -> int | None:
    """Count the trips of a loop by running its counter, None if that cannot be read."""
    condition = module.computations[loop.find(r" condition=%([\w.-]+)")]
    body = module.computations[loop.find(BODY)]
    before = _before(module, loop, computation, values)
    state = dict[int, int | None]()

    def element_of(number: int, element: int | None) -> int | None:
        if element is None:
            return None
        if element not in state:
            state[element] = before(element)
        return state[element]

    def step(element: int) -> int | None:
        made = body.operands(body.root)[element]
        return _evaluate(module, made, body, element_of)

    for trips in range(_MOST_TRIPS):
        goes_on = _evaluate(module, condition.root, condition, element_of)
        if not goes_on:
            return None if goes_on is None else trips
        if body.root.opcode != "tuple":
            return None
        state |= {element: step(element) for element in list(state)}
    return None


def _evaluate(
    module: Module, instruction: Instruction, computation: Computation, values: Values
) -> int | None:
    """Give the value of an integer scalar, None if it is not known."""

    def value(of: Instruction) -> int | None:
        return _evaluate(module, of, computation, values)

    opcode, arguments = instruction.opcode, instruction.arguments
    if opcode == "constant":
        return int(arguments) if re.fullmatch(r"-?\d+", arguments) else None
    if opcode == "parameter":
        return values(int(arguments), None)
    operands = computation.operands(instruction)
    if opcode == "get-tuple-element":
        (source,), index = operands, index_of(instruction)
        if source.opcode == "parameter":
            return values(int(source.arguments), index)
        known = source.opcode == "tuple"
        return value(computation.operands(source)[index]) if known else None
    if opcode in _FORWARDED:
        return value(operands[0])
    if opcode == "fusion":
        called = module.computations[instruction.called[0]]
        return _evaluate(
            module, called.root, called, lambda number, _: value(operands[number])
        )
    if opcode in _ARITHMETIC or opcode == "compare":
        a, b = (value(operand) for operand in operands)
        if a is None or b is None:
            return None
        if opcode == "compare":
            return _COMPARISONS[instruction.find(r" direction=(\w\w)")](a, b)
        return _ARITHMETIC[opcode](a, b)
    return None
