"""A few figures about a compiled step that people ask for.

They say whether the state is updated in place, which kernels run, what the largest
buffers are, which copies are large, and in which dtypes products are computed.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from train.plan.compiled.attribution import part_of, producers, scope
from train.plan.compiled.buffers import Buffer, largest_buffers
from train.plan.compiled.flops import multiplied
from train.plan.compiled.hbm_bytes import NOTHING_MOVES, count_hbm_bytes, memory_bytes
from train.plan.compiled.hlo import Instruction, Module
from train.plan.compiled.source_lines import SourceLines
from train.plan.compiled.trip_counts import read

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}, \w+-alias\)")
_BUFFERS = 10
_MUCH = 0.01  # the fraction of all bytes to and from memory from which a copy is shown
_MOVES = {"copy", "transpose"}
_FREE = {"parameter", "bitcast", "reshape", "tuple", "constant"}
# How XLA marks things, not kernels.
_MARKS = (
    *(*NOTHING_MOVES, "AssumeGatherIndicesInBound", "Sharding"),
    *("AsyncCollectiveStart", "AsyncCollectiveDone"),
)


class InPlace(NamedTuple):
    """updated: arrays with a place of an argument's; others: those without."""

    updated: list[str]
    others: list[str]


@dataclass(frozen=True)
class Copied:
    """A copy or transpose: its bytes to and from memory, `share` of all."""

    name: str
    times: int
    bytes: int
    share: float
    what: str


@dataclass(frozen=True)
class Inspection:
    """The figures of one device.

    in_place: the arrays of the state by whether the step updates them in place.
    kernels: how often each custom call runs, by its name.
    buffers: the largest buffers.
    copies: copies above one percent of the bytes to and from memory.
    operand_bytes: bytes of the operands of products and attention kernels, by dtype.
    """

    in_place: InPlace
    kernels: dict[str, int]
    buffers: list[Buffer]
    copies: list[Copied]
    operand_bytes: dict[str, int]


def inspect(text: str, state: Sequence[str]) -> Inspection:
    """Look into a compiled step, of `compiled.as_text()`.

    `state` names the arrays of the state, which are its first results.
    """
    module, lines = read(text), SourceLines(text)
    return Inspection(
        in_place=updated_in_place(text, state),
        kernels=_kernels(module),
        buffers=largest_buffers(module, lines, _BUFFERS),
        copies=_copies(module, lines),
        operand_bytes=_operand_bytes(module),
    )


def updated_in_place(text: str, names: Sequence[str]) -> InPlace:
    """Sort a program's first results, by their names, by whether an argument gave room.

    A donated argument that nothing needs any more gives its memory to a result of the
    same shape, dtype and layout; the first line of the program says which.
    """
    header = text[: text.find("\n")]
    aliased = {int(number or 0) for number in _ALIAS.findall(header)}
    updated = [name for i, name in enumerate(names) if i in aliased]
    return InPlace(updated, [name for i, name in enumerate(names) if i not in aliased])


def _kernels(module: Module) -> dict[str, int]:
    counts = Counter[str]()
    for executed in module.executed:
        for inner in executed.instruction.parts:
            if inner.opcode == "custom-call":
                counts[_kernel_name(inner)] += executed.times
    return {name: n for name, n in counts.most_common() if name not in _MARKS}


def _kernel_name(call: Instruction) -> str:
    """Return the target; of Pallas' kernels, which share one, their own name."""
    base_name = re.sub(r"(\.\d+|\.clone)+$", "", call.name)
    return base_name if call.target == "tpu_custom_call" else call.target


def _copies(module: Module, lines: SourceLines) -> list[Copied]:
    total, copies = count_hbm_bytes(module).total, list[Copied]()
    for executed in module.executed:
        instruction = executed.instruction
        if not _only_moves(instruction):
            continue
        num_bytes = executed.times * memory_bytes(instruction)
        if num_bytes > _MUCH * total:
            names = (producer.op_name for producer in producers(instruction))
            part = next(filter(None, map(part_of, names)), "")
            words = (
                f"{scope(executed, instruction)} {part}".strip(),
                lines.line_of(instruction),
            )
            label = ", ".join(filter(None, words))
            share = num_bytes / total
            copies.append(
                Copied(instruction.name, executed.times, num_bytes, share, label)
            )
    return sorted(copies, key=lambda one: -one.bytes)


def _only_moves(instruction: Instruction) -> bool:
    """Tell whether an instruction, or all that a fusion holds, copies or transposes."""
    if instruction.opcode != "fusion":
        return instruction.opcode in _MOVES
    opcodes = {inner.opcode for inner in instruction.inside} - _FREE
    return bool(opcodes) and opcodes <= _MOVES


def _operand_bytes(module: Module) -> dict[str, int]:
    sizes = Counter[str]()
    for executed in module.executed:
        for inner in executed.instruction.parts:
            for array in multiplied(inner):
                sizes[array.dtype] += executed.times * array.num_bytes
    return dict(sizes.most_common())
