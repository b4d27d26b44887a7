"""The largest buffers of a compiled step: what makes each, and when it dies.

Read off the schedule: a buffer lives from the instruction that makes it to the last one
that uses it. Elements of tuples, what loops hand on from trip to trip, and updates in
place are views of one buffer. What XLA puts into the same place one after the other
counts as several; bytes are without the padding of tiles. Arguments (the state and the
batch), and what is written into their places, are left out.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from train.plan.compiled.attribution import part_of, producers, scope
from train.plan.compiled.hlo import (
    Array,
    Computation,
    Executed,
    Instruction,
    Module,
    index_of,
)
from train.plan.compiled.source_lines import SourceLines

_VIEWS = ("bitcast", "opt-barrier", "while")
_NO_USE = ("tuple", "get-tuple-element", "bitcast", "parameter", "opt-barrier")
_ZEROS = re.compile(r"broadcast|AllocateBuffer")  # before anything else is in it


class Key(NamedTuple):
    """An element of what an instruction makes."""

    computation: str
    instruction: str
    element: int


@dataclass(frozen=True)
class Buffer:
    """For people: `made` and `dies` are a place in the step, and lines of source."""

    bytes: int
    array: str
    made: str
    dies: str


def largest_buffers(module: Module, lines: SourceLines, count: int) -> list[Buffer]:
    """List the buffers of a program that hold most, in main memory.

    Args:
        module: that was read with what it executes.
        lines: of its source.
        count: how many.
    """
    lives = _Lives(module)
    sizes = sorted(lives.arrays.items(), key=lambda item: -item[1].num_bytes)
    result = []
    for key, array in sizes[:count]:
        dims = ",".join(map(str, array.dims))
        maker, last = lives.makers[key], lives.last.get(key)
        result.append(
            Buffer(
                array.num_bytes,
                f"{array.dtype}[{dims}]",
                _described(module, maker, lines),
                _described(module, last, lines) if last else "nothing uses it",
            )
        )
    return result


def _described(module: Module, executed: Executed, lines: SourceLines) -> str:
    """Return where in the step something stands, and its lines of source."""
    own, part, line = executed.instruction, "", ""
    for made in (own, *producers(module, own, executed.computation)):
        line = line or lines.line_of(made)
        if part := part_of(made.op_name):
            line = lines.line_of(made) or line
            break
    place = scope(executed, own)
    words = [place if part in place else f"{place} {part}".strip(), line]
    return ", ".join(filter(None, words)) or own.name


class _Lives:
    """The buffers of a program, who fills each, and who uses each last."""

    def __init__(self, module: Module):
        self.module = module
        self.arrays: dict[Key, Array] = {}
        self.makers: dict[Key, Executed] = {}
        self.last: dict[Key, Executed] = {}
        self._known: dict[Key, Key | None] = {}
        self._loops = {
            loop.body: (loop.instruction, loop.within) for loop in module.loops.values()
        }
        self._handed_on: dict[Key, Key] = {}
        for body, (instruction, within) in self._loops.items():
            computation = module.computations[body]
            for number in range(len(instruction.arrays)):
                own = self._of(computation, computation.root, number)
                carried = self._of(within, instruction, number)
                if own and carried and own.computation == body:
                    self._handed_on[own] = carried
        self._collect()

    def _collect(self) -> None:
        entry, filled = self.module.entry, defaultdict[Key, bool](bool)
        for executed in self.module.executed:
            instruction, computation = executed.instruction, executed.computation
            for number, array in enumerate(instruction.arrays):
                key = self._holder(self._of(computation, instruction, number))
                if key is None or _makes_nothing(instruction.opcode):
                    continue
                own = key == (computation.name, instruction.name, number)
                if own and array.space == 0 and array.num_bytes:
                    self.arrays[key] = array
                if not filled[key]:  # zeros do not count, what is put there does
                    self.makers[key] = executed
                    target = instruction.find(r'custom_call_target="([^"]*)"')
                    filled[key] = not _ZEROS.search(f"{instruction.name} {target}")
            if instruction.opcode not in _NO_USE:
                for key in self._used(computation, instruction):
                    self.last[key] = executed
        for number in range(len(entry.root.arrays)):  # of results, and what aliases
            key = self._holder(self._of(entry, entry.root, number))
            if key:
                self.arrays.pop(key, None)

    def _used(self, computation: Computation, user: Instruction) -> Iterator[Key]:
        for operand in computation.operands(user):
            for number in range(len(operand.arrays)):
                key = self._holder(self._of(computation, operand, number))
                if key:
                    yield key

    def _holder(self, key: Key | None) -> Key | None:
        while key is not None and key in self._handed_on:
            key = self._handed_on[key]
        return key

    def _of(self, within: Computation, made: Instruction, element: int) -> Key | None:
        """Return what holds an element; None: an argument."""
        key = Key(within.name, made.name, element)
        if key not in self._known:
            self._known[key] = self._find(key, within, made)
        return self._known[key]

    def _find(self, key: Key, within: Computation, made: Instruction) -> Key | None:
        operands, opcode, element = within.operands(made), made.opcode, key.element
        if opcode == "parameter":
            if within.name not in self._loops:
                return None
            instruction, outside = self._loops[within.name]
            return self._of(outside, instruction, element)
        if opcode == "get-tuple-element":
            return self._of(within, operands[0], index_of(made))
        if opcode == "tuple" and element < len(operands):
            return self._of(within, operands[element], 0)
        if opcode in _VIEWS:
            return self._of(within, operands[0], element)
        if opcode == "dynamic-update-slice":
            return self._of(within, operands[0], 0)
        if opcode == "fusion":
            inside = self.module.computations[made.called[0]]
            updated = _updated(inside, element)
            if updated is not None:
                return self._of(within, operands[updated], 0)
        return key


def _makes_nothing(opcode: str) -> bool:
    """Tell whether all that an instruction gives is there already, or not yet."""
    return opcode in (*_NO_USE, "while") or opcode.endswith("-start")


def _updated(inside: Computation, element: int) -> int | None:
    """Return the operand that a fusion updates in place for an element, if one."""
    made = inside.root
    if made.opcode == "tuple":
        operands = inside.operands(made)
        made = operands[element] if element < len(operands) else made
    while made.opcode in ("bitcast", "dynamic-update-slice"):
        made = inside.operands(made)[0]
    return int(made.arguments) if made.opcode == "parameter" else None
