"""Summarise a compiled step: updates in place, kernels and the largest buffers."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from train.plan.compiled.attribution import first_part, producers, scope_of
from train.plan.compiled.hbm_bytes import NO_TRAFFIC_TARGETS
from train.plan.compiled.hlo import Module
from train.plan.compiled.trip_counts import read_module

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}, \w+-alias\)")
_MAX_BUFFERS = 10
# Results that are views of other buffers, or the initial value of a buffer.
_NO_BUFFERS = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("while", "call", "conditional", "fusion", "constant", "broadcast"),
}
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
class Buffer:
    """A result in main memory, its size without padding, and the instruction."""

    bytes: int
    array: str  # the dtype and dims
    made: str  # the scope, the part of the model and the name of the instruction


@dataclass(frozen=True)
class Inspection:
    """The summary of a compiled step for one device."""

    in_place: InPlace
    kernels: dict[str, int]  # executions of each custom call, by name
    buffers: list[Buffer]  # the largest ones besides the state


def inspect(
    text: str, state: Sequence[str], model: ModelConfig | None = None
) -> Inspection:
    """Summarise a compiled step, given its `compiled.as_text()`.

    `state` names the arrays of the state, which are the program's first results.
    """
    # The program's first line lists the results that are updated in place.
    aliased = {int(number or 0) for number in _ALIAS.findall(text.partition("\n")[0])}
    module = read_module(text, model)
    kernels = defaultdict[str, float](float)
    for executed in module.executed:
        for inner in executed.instruction.with_nested:
            if inner.opcode == "custom-call":
                is_pallas = inner.target == "tpu_custom_call"  # on TPU
                pallas_name = re.sub(r"(\.\d+|\.clone)+$", "", inner.name)
                kernels[pallas_name if is_pallas else inner.target] += executed.count
    return Inspection(
        in_place=InPlace(
            updated=[name for i, name in enumerate(state) if i in aliased],
            others=[name for i, name in enumerate(state) if i not in aliased],
        ),
        kernels={
            name: round(kernels[name])
            for name in sorted(kernels, key=kernels.__getitem__, reverse=True)
            if name not in _MARKERS
        },
        buffers=_largest_buffers(module),
    )


def _largest_buffers(module: Module) -> list[Buffer]:
    """Return the largest buffers, except those that become the program's results.

    Several updates of one buffer in place are listed separately, as are buffers that
    use the same memory at different times.
    """
    results = {
        value.operands[0] if value.opcode == "get-tuple-element" else value
        for value in module.entry.root.operands
    }
    buffers = list[Buffer]()
    for executed in module.executed:
        instruction = executed.instruction
        is_copy = instruction.opcode == "copy"
        source = instruction.operands[0] if is_copy else instruction
        opcodes = {inner.opcode for inner in source.with_nested}
        is_view = opcodes <= _NO_BUFFERS or instruction.opcode.endswith("-start")
        if is_view or instruction in results or instruction.target == "AllocateBuffer":
            continue
        part = first_part(value.op_name for value in producers(instruction))
        place = f"{scope_of(executed, instruction)} {part}".strip()
        for array in instruction.arrays:
            if array.space == 0:
                dims = ",".join(map(str, array.dims))
                made = f"{place} ({instruction.name})".strip()
                buffers.append(Buffer(array.num_bytes, f"{array.dtype}[{dims}]", made))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)[:_MAX_BUFFERS]
