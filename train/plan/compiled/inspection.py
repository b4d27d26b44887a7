"""What the compiler made of a step, in a few figures that people ask for.

Whether the state is updated in place, which kernels run, what the largest buffers are,
which copies are worth a look, and in which dtypes products are taken.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from train.plan.compiled.attribution import part_in_name, producers, scope_of
from train.plan.compiled.buffers import Buffer, largest_buffers
from train.plan.compiled.flops import multiplied
from train.plan.compiled.hbm_bytes import (
    NOTHING_MOVES,
    count_memory_traffic,
    memory_traffic,
)
from train.plan.compiled.hlo import Instruction, Module
from train.plan.compiled.source_lines import SourceLines
from train.plan.compiled.trip_counts import read_module

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}, \w+-alias\)")
_BUFFERS = 10
_MUCH = 0.01  # of all bytes to and from memory
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
    """Of one device.

    in_place: the arrays of the state by whether the step updates them in place.
    kernels: how often each custom call runs, by its name.
    buffers: the largest.
    copies: those above one percent of the bytes to and from memory.
    operand_bytes: of products and attention kernels, by dtype.
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
    module, lines = read_module(text), SourceLines(text)
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
        for inner in executed.instruction.with_nested:
            if inner.opcode == "custom-call":
                counts[_kernel_name(inner)] += executed.times
    return {name: n for name, n in counts.most_common() if name not in _MARKS}


def _kernel_name(call: Instruction) -> str:
    """Return the target; of Pallas' kernels, which share one, their own name."""
    own = re.sub(r"(\.\d+|\.clone)+$", "", call.name)
    return own if call.target == "tpu_custom_call" else call.target


def _copies(module: Module, lines: SourceLines) -> list[Copied]:
    total, found = count_memory_traffic(module).total, list[Copied]()
    for executed in module.executed:
        own = executed.instruction
        if not _only_moves(own):
            continue
        moved = executed.times * memory_traffic(own)
        if moved > _MUCH * total:
            names = (made.op_name for made in producers(own))
            part = next(filter(None, map(part_in_name, names)), "")
            words = f"{scope_of(executed, own)} {part}".strip(), lines.line_of(own)
            what = ", ".join(filter(None, words))
            share = moved / total
            found.append(Copied(own.name, executed.times, moved, share, what))
    return sorted(found, key=lambda one: -one.bytes)


def _only_moves(instruction: Instruction) -> bool:
    """Tell whether an instruction, or all that a fusion holds, copies or transposes."""
    if instruction.opcode != "fusion":
        return instruction.opcode in _MOVES
    opcodes = {inner.opcode for inner in instruction.nested} - _FREE
    return bool(opcodes) and opcodes <= _MOVES


def _operand_bytes(module: Module) -> dict[str, int]:
    sizes = Counter[str]()
    for executed in module.executed:
        for inner in executed.instruction.with_nested:
            for array in multiplied(inner):
                sizes[array.dtype] += executed.times * array.num_bytes
    return dict(sizes.most_common())
