"""List the largest buffers of a compiled step, with their makers and last uses.

A buffer lives from the instruction that makes it to the last instruction that uses it,
in scheduled order. A tuple element, a value that a loop carries from trip to trip, and
an in-place update share the buffer of their source. Buffers that reuse the same memory
count separately, and sizes exclude the padding of tiles. Arguments (the state and the
batch) and results that alias arguments are omitted.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from train.plan.compiled.attribution import part_in_name, producers, scope_of
from train.plan.compiled.hbm_bytes import is_view
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
# These instructions only initialise a buffer; its maker runs after them.
_INITIALIZERS = re.compile(r"broadcast|AllocateBuffer")


class Key(NamedTuple):
    """An element of an instruction's result."""

    instruction: Instruction
    element: int


@dataclass(frozen=True)
class Buffer:
    """A buffer, described for people.

    bytes: the size without padding.
    array: the dtype and dims.
    made: the scope, part of the model and source lines of the maker.
    dies: the same for the last use.
    """

    bytes: int
    array: str
    made: str
    dies: str


def largest_buffers(module: Module, lines: SourceLines, count: int) -> list[Buffer]:
    """Return the `count` largest buffers of a program in main memory."""
    lifetimes = _Lifetimes(module)
    sizes = sorted(lifetimes.arrays.items(), key=lambda item: -item[1].num_bytes)
    buffers = []
    for key, array in sizes[:count]:
        dims, last_use = ",".join(map(str, array.dims)), lifetimes.last_uses.get(key)
        buffers.append(
            Buffer(
                bytes=array.num_bytes,
                array=f"{array.dtype}[{dims}]",
                made=_describe(lifetimes.makers[key], lines),
                dies=_describe(last_use, lines) if last_use else "nothing uses it",
            )
        )
    return buffers


def _describe(executed: Executed, lines: SourceLines) -> str:
    """Return an instruction's scope, part of the model and source lines."""
    instruction, part, line = executed.instruction, "", ""
    for producer in (instruction, *producers(instruction)):
        line = line or lines.line_of(producer)
        if part := part_in_name(producer.op_name):
            line = lines.line_of(producer) or line
            break
    scope = scope_of(executed, instruction)
    place_in_step = scope if part in scope else f"{scope} {part}".strip()
    return ", ".join(filter(None, (place_in_step, line))) or instruction.name


class _Lifetimes:
    """The buffers of a program, keyed by the element that owns the memory."""

    def __init__(self, module: Module):
        self.module = module
        self.arrays: dict[Key, HloArray] = {}
        self.makers: dict[Key, Executed] = {}
        self.last_uses: dict[Key, Executed] = {}
        self._owners: dict[Key, Key | None] = {}
        # The element of a loop's state that a result of the body fills.
        self._carried: dict[Key, Key] = {}
        for loop in module.loops.values():
            for number in range(len(loop.instruction.arrays)):
                result = self._owner_of(loop.body.root, number)
                state = self._owner_of(loop.instruction, number)
                if result and state and result.instruction.computation is loop.body:
                    self._carried[result] = state
        self._collect()

    def _collect(self) -> None:
        root, made_keys = self.module.entry.root, set[Key]()
        for executed in self.module.executed:
            instruction = executed.instruction
            for number, array in enumerate(instruction.arrays):
                key = self._buffer_of(instruction, number)
                if key is None or _makes_nothing(instruction.opcode):
                    continue
                is_owner = key == (instruction, number)
                if is_owner and array.space == 0 and array.num_bytes:
                    self.arrays[key] = array
                if key not in made_keys:  # The maker runs after the initialisation.
                    self.makers[key] = executed
                    if not _INITIALIZERS.search(
                        f"{instruction.name} {instruction.target}"
                    ):
                        made_keys.add(key)
            if instruction.opcode not in _NO_USE:
                for operand in instruction.operands:
                    for number in range(len(operand.arrays)):
                        if key := self._buffer_of(operand, number):
                            self.last_uses[key] = executed
        for number in range(len(root.arrays)):  # results, which alias arguments
            if key := self._buffer_of(root, number):
                self.arrays.pop(key, None)

    def _buffer_of(self, instruction: Instruction, element: int) -> Key | None:
        """Return the buffer of an element, following loops, or None for arguments."""
        key = self._owner_of(instruction, element)
        while key is not None and key in self._carried:
            key = self._carried[key]
        return key

    def _owner_of(self, instruction: Instruction, element: int) -> Key | None:
        """Return the element that owns the memory, or None for arguments."""
        key = Key(instruction, element)
        if key not in self._owners:
            self._owners[key] = self._find_owner(key)
        return self._owners[key]

    def _find_owner(self, key: Key) -> Key | None:
        instruction, element = key
        operands, opcode = instruction.operands, instruction.opcode
        if opcode == "parameter":
            loop = self.module.loops.get(instruction.computation.name)
            return self._owner_of(loop.instruction, element) if loop else None
        if opcode == "get-tuple-element":
            return self._owner_of(operands[0], instruction.index)
        if opcode == "tuple" and element < len(operands):
            return self._owner_of(operands[element], 0)
        if opcode in _VIEWS:
            return self._owner_of(operands[0], element)
        if opcode == "dynamic-update-slice":
            return self._owner_of(operands[0], 0)
        if opcode == "fusion":
            updated = _updated_operand(instruction.called[0], element)
            if updated is not None:
                return self._owner_of(operands[updated], 0)
        return key


def _makes_nothing(opcode: str) -> bool:
    """Return whether an opcode's result is a view or is not complete yet."""
    return opcode in (*_NO_USE, "while") or opcode.endswith("-start")


def _updated_operand(body: Computation, element: int) -> int | None:
    """Return the operand that a fusion updates in place for an element, if any."""
    result = body.root
    if result.opcode == "tuple":
        operands = result.operands
        result = operands[element] if element < len(operands) else result
    while result.opcode == "dynamic-update-slice" or is_view(result):
        result = result.operands[0]
    return int(result.arguments) if result.opcode == "parameter" else None
