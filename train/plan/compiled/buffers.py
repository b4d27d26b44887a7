"""List the largest buffers of a compiled step, with their makers.

A buffer is a result in main memory. Views have no buffer of their own. If a loop fills
a buffer in place, the instruction of the loop is its maker, and not the instruction
that initialises it. The results of the program, which take the place of its arguments,
are omitted. Buffers that use the same memory at different times are listed separately,
as are several updates of one buffer in place. Sizes exclude padding.
"""

from dataclasses import dataclass

from train.plan.compiled.attribution import place_in_step
from train.plan.compiled.hlo import Instruction, Module

_VIEWS = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("while", "call", "conditional"),
}
_INITIAL = {"parameter", "constant", "broadcast", "bitcast"}


@dataclass(frozen=True)
class Buffer:
    """A buffer, described for people.

    bytes: the size without padding.
    array: the dtype and dims.
    made: the scope, the part of the model and the name of the maker.
    """

    bytes: int
    array: str
    made: str


def largest_buffers(module: Module, count: int) -> list[Buffer]:
    """Return the `count` largest buffers of a program in main memory."""
    results, candidates = _results(module), []
    for executed in module.executed:
        instruction = executed.instruction
        if instruction not in results and _makes_buffers(instruction):
            arrays = (array for array in instruction.arrays if array.space == 0)
            candidates += [(array, executed) for array in arrays if array.num_bytes]
    candidates.sort(key=lambda item: -item[0].num_bytes)
    return [
        Buffer(
            bytes=array.num_bytes,
            array=f"{array.dtype}[{','.join(map(str, array.dims))}]",
            made=f"{place_in_step(executed)} ({executed.instruction.name})".strip(),
        )
        for array, executed in candidates[:count]
    ]


def _makes_buffers(instruction: Instruction) -> bool:
    """Return whether a result is neither a view, incomplete, nor an initial value."""
    is_view = instruction.opcode in _VIEWS or instruction.opcode.endswith("-start")
    return not is_view and not _initialises(instruction)


def _initialises(instruction: Instruction) -> bool:
    if instruction.opcode == "copy":
        return _initialises(instruction.operands[0])
    return instruction.opcodes <= _INITIAL or instruction.target == "AllocateBuffer"


def _results(module: Module) -> set[Instruction]:
    """Return the instructions that make the program's results."""
    makers, values = set[Instruction](), [module.entry.root]
    while values:
        value = values.pop()
        if value.opcode in ("tuple", "bitcast"):
            values += value.operands
        elif value.opcode == "get-tuple-element":
            source = value.operands[0]
            if source.opcode in ("while", "opt-barrier"):
                is_loop = source.opcode == "while"
                source = source.body.root if is_loop else source.operands[0]
            is_tuple = source.opcode == "tuple"
            values.append(source.operands[value.index] if is_tuple else source)
        else:
            makers.add(value)
    return makers
