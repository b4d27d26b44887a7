"""The largest buffers of a compiled step: what makes each, and when it dies.

Read off the schedule: a buffer lives from the instruction that makes it to the last one
that uses it. Elements of tuples, what loops hand on from trip to trip, and updates in
place are views of one buffer. What XLA puts into the same place one after the other
counts as several; bytes are without the padding of tiles. Arguments (the state and the
batch), and what is written into their places, are left out.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from train.plan.compiled.attribution import part_in_name, producers, scope_of
from train.plan.compiled.hlo import (
    Computation,
    Executed,
    HloArray,
    Instruction,
    Module,
)
from train.plan.compiled.source_lines import SourceLines

_VIEWS = ("bitcast", "opt-barrier", "while")
_NO_USE = ("tuple", "get-tuple-element", "bitcast", "parameter", "opt-barrier")
_ZEROS = re.compile(r"broadcast|AllocateBuffer")  # before anything else is in it


class Key(NamedTuple):
    """An element of what an instruction makes."""

    instruction: Instruction
    element: int


@dataclass(frozen=True)
class Buffer:
    """For people: `made` and `dies` are a place in the step, and lines of source."""

    bytes: int
    array: str
    made: str
    dies: str


def largest_buffers(module: Module, lines: SourceLines, count: int) -> list[Buffer]:
    """List so many buffers of a program that hold most, in main memory."""
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
                _described(maker, lines),
                _described(last, lines) if last else "nothing uses it",
            )
        )
    return result


def _described(executed: Executed, lines: SourceLines) -> str:
    """Return where in the step something stands, and its lines of source."""
    own, part, line = executed.instruction, "", ""
    for made in (own, *producers(own)):
        line = line or lines.line_of(made)
        if part := part_in_name(made.op_name):
            line = lines.line_of(made) or line
            break
    place = scope_of(executed, own)
    words = [place if part in place else f"{place} {part}".strip(), line]
    return ", ".join(filter(None, words)) or own.name


class _Lives:
    """The buffers of a program, who fills each, and who uses each last."""

    def __init__(self, module: Module):
        self.module = module
        self.arrays: dict[Key, HloArray] = {}
        self.makers: dict[Key, Executed] = {}
        self.last: dict[Key, Executed] = {}
        self._known: dict[Key, Key | None] = {}
        self._handed_on: dict[Key, Key] = {}
        for loop in module.loops.values():
            for number in range(len(loop.instruction.arrays)):
                own = self._of(loop.body.root, number)
                carried = self._of(loop.instruction, number)
                if own and carried and own.instruction.computation is loop.body:
                    self._handed_on[own] = carried
        self._collect()

    def _collect(self) -> None:
        root, filled = self.module.entry.root, defaultdict[Key, bool](bool)
        for executed in self.module.executed:
            instruction = executed.instruction
            for number, array in enumerate(instruction.arrays):
                key = self._holder(self._of(instruction, number))
                if key is None or _makes_nothing(instruction.opcode):
                    continue
                own = key == (instruction, number)
                if own and array.space == 0 and array.num_bytes:
                    self.arrays[key] = array
                if not filled[key]:  # zeros do not count, what is put there does
                    self.makers[key] = executed
                    name = f"{instruction.name} {instruction.target}"
                    filled[key] = not _ZEROS.search(name)
            if instruction.opcode not in _NO_USE:
                for operand in instruction.operands:
                    for number in range(len(operand.arrays)):
                        if key := self._holder(self._of(operand, number)):
                            self.last[key] = executed
        for number in range(len(root.arrays)):  # of results, and what aliases
            if key := self._holder(self._of(root, number)):
                self.arrays.pop(key, None)

    def _holder(self, key: Key | None) -> Key | None:
        while key is not None and key in self._handed_on:
            key = self._handed_on[key]
        return key

    def _of(self, made: Instruction, element: int) -> Key | None:
        """Return what holds an element; None: an argument."""
        key = Key(made, element)
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def _find(self, key: Key) -> Key | None:
        made, element = key
        operands, opcode = made.operands, made.opcode
        if opcode == "parameter":
            loop = self.module.loops.get(made.computation.name)
            return self._of(loop.instruction, element) if loop else None
        if opcode == "get-tuple-element":
            return self._of(operands[0], made.index)
        if opcode == "tuple" and element < len(operands):
            return self._of(operands[element], 0)
        if opcode in _VIEWS:
            return self._of(operands[0], element)
        if opcode == "dynamic-update-slice":
            return self._of(operands[0], 0)
        if opcode == "fusion":
            updated = _updated(made.called[0], element)
            if updated is not None:
                return self._of(operands[updated], 0)
        return key


def _makes_nothing(opcode: str) -> bool:
    """Tell whether all that an instruction gives is there already, or not yet."""
    return opcode in (*_NO_USE, "while") or opcode.endswith("-start")


def _updated(inside: Computation, element: int) -> int | None:
    """Return the operand that a fusion updates in place for an element, if one."""
    made = inside.root
    if made.opcode == "tuple":
        operands = made.operands
        made = operands[element] if element < len(operands) else made
    while made.opcode in ("bitcast", "dynamic-update-slice"):
        made = made.operands[0]
    return int(made.arguments) if made.opcode == "parameter" else None
