"""Summarise a compiled step.

The summary lists the arrays of the state that are updated in place, the kernels, the
largest buffers, the expensive copies, and the dtypes of products.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from train.plan.compiled.attribution import place_in_step
from train.plan.compiled.buffers import Buffer, largest_buffers
from train.plan.compiled.flops import multiplied_arrays
from train.plan.compiled.hbm_bytes import (
    NO_TRAFFIC_TARGETS,
    count_memory_traffic,
    memory_traffic,
)
from train.plan.compiled.hlo import Instruction, Module
from train.plan.compiled.trip_counts import read_module

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}, \w+-alias\)")
_MAX_BUFFERS = 10
_MIN_COPY_SHARE = 0.01  # fraction of all main-memory traffic
_MOVES = {"copy", "transpose"}
_NO_TRAFFIC = {"parameter", "bitcast", "reshape", "tuple", "constant"}
# Custom calls that are markers of XLA, not kernels.
_MARKERS = (
    *(*NO_TRAFFIC_TARGETS, "AssumeGatherIndicesInBound", "Sharding"),
    *("AsyncCollectiveStart", "AsyncCollectiveDone"),
)


@dataclass(frozen=True)
class InPlace:
    """The names of the state's arrays that are, and are not, updated in place."""

    updated: list[str]
    others: list[str]


@dataclass(frozen=True)
class CostlyCopy:
    """A copy or transpose with much memory traffic.

    name: the name of the instruction.
    times: executions in one step.
    bytes: the memory traffic in one step.
    share: the fraction of all memory traffic.
    what: the scope and the part of the model.
    """

    name: str
    times: int
    bytes: int
    share: float
    what: str


@dataclass(frozen=True)
class Inspection:
    """The summary of a compiled step for one device.

    in_place: the arrays of the state that are, and are not, updated in place.
    kernels: executions of each custom call, by name.
    buffers: the largest buffers.
    copies: the copies with more than one percent of all memory traffic.
    operand_bytes: the bytes that products and attention kernels multiply, by dtype.
    """

    in_place: InPlace
    kernels: dict[str, int]
    buffers: list[Buffer]
    copies: list[CostlyCopy]
    operand_bytes: dict[str, int]


def inspect(
    text: str, state: Sequence[str], model: ModelConfig | None = None
) -> Inspection:
    """Summarise a compiled step, given its `compiled.as_text()`.

    `state` names the arrays of the state, which are the program's first results.
    `model` has the same meaning as in `read_module`.
    """
    module, kernels, operands = read_module(text, model), Counter(), Counter()
    for executed in module.executed:
        for inner in executed.instruction.with_nested:
            if inner.opcode == "custom-call":
                kernels[_kernel_name(inner)] += executed.count
            for array in multiplied_arrays(inner):
                operands[array.dtype] += executed.count * array.num_bytes
    return Inspection(
        in_place=updated_in_place(text, state),
        kernels={name: n for name, n in kernels.most_common() if name not in _MARKERS},
        buffers=largest_buffers(module, _MAX_BUFFERS),
        copies=_costly_copies(module),
        operand_bytes=dict(operands.most_common()),
    )


def updated_in_place(text: str, names: Sequence[str]) -> InPlace:
    """Split the names of a program's first results by whether they alias arguments.

    XLA reuses the memory of a donated argument for a result of the same shape, dtype
    and layout; the first line of the program lists the pairs.
    """
    header = text[: text.find("\n")]
    aliased = {int(number or 0) for number in _ALIAS.findall(header)}
    return InPlace(
        updated=[name for i, name in enumerate(names) if i in aliased],
        others=[name for i, name in enumerate(names) if i not in aliased],
    )


def _kernel_name(call: Instruction) -> str:
    """Return the target of a custom call, or the name of a Pallas call on TPU."""
    if call.target == "tpu_custom_call":
        return re.sub(r"(\.\d+|\.clone)+$", "", call.name)
    return call.target


def _costly_copies(module: Module) -> list[CostlyCopy]:
    total, copies = count_memory_traffic(module.executed).total, list[CostlyCopy]()
    for executed in module.executed:
        instruction = executed.instruction
        traffic = executed.count * memory_traffic(instruction)
        if traffic > _MIN_COPY_SHARE * total and _only_moves(instruction):
            copy = CostlyCopy(
                name=instruction.name,
                times=executed.count,
                bytes=traffic,
                share=traffic / total,
                what=place_in_step(executed),
            )
            copies.append(copy)
    return sorted(copies, key=lambda copy: -copy.bytes)


def _only_moves(instruction: Instruction) -> bool:
    """Return whether an instruction or fusion only copies and transposes."""
    opcodes = instruction.opcodes - _NO_TRAFFIC
    return bool(opcodes) and opcodes <= _MOVES
