"""What an instruction of a compiled program reads from and writes to main memory.

An upper estimate of the traffic between a device and its main memory: each instruction
by itself, as if no cache held anything from one to the next.
"""

from collections.abc import Iterable

from train.plan.compiled.flops import multiplies
from train.plan.compiled.hlo import Computation, HloArray, Instruction, Module
from train.plan.cost import HbmBytes

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "call", "conditional", "opt-barrier", "partition-id", "replica-id"),
}
# Results of a fusion that are written by others: operands that are passed on, and what
# a collective gives that runs beside several fusions (TPU), each of which names it.
_NOT_WRITTEN = ("parameter", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")
# TPU: a buffer without content, and slices that lie behind each other already.
NOTHING_MOVES = ("AllocateBuffer", "ConcatBitcast")


def count_memory_traffic(module: Module) -> HbmBytes:
    """Add up a program."""
    products = others = 0
    for executed in module.executed:
        moved = executed.times * memory_traffic(executed.instruction)
        if moved and multiplies(executed.instruction):
            products += moved
        else:
            others += moved
    return HbmBytes(products, others)


def memory_traffic(instruction: Instruction) -> int:
    """Estimate what an instruction reads from and writes to main memory.

    A slice reads what it takes, an update in place writes what is new, also inside a
    fusion. What lies in a memory of the core (TPU) costs nothing here.
    """
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.target in NOTHING_MOVES:
        return 0
    operands = instruction.operands
    if instruction.opcode in ("fusion", "fusion-start"):
        inside = instruction.called[0]
        read = sum(
            min(_main_bytes(operand), _read_by_fusion(number, inside))
            for number, operand in enumerate(operands)
        )
        return read + _written_by_fusion(inside)
    read, written = sum(map(_main_bytes, operands)), _main_bytes(instruction)
    if instruction.opcode in ("dynamic-slice", "gather", "slice"):
        read = min(written, read)
    elif instruction.opcode == "dynamic-update-slice":
        read = written = min(_main_bytes(operands[1]), written)
    elif instruction.opcode == "copy-start":
        written = _main_bytes_of(instruction.arrays[:1])
    elif instruction.opcode == "slice-start":
        part = instruction.arrays[len(operands)]
        read, written = min(read, part.num_bytes), _main_bytes_of([part])
    elif instruction.opcode.endswith("-start"):
        written = 0  # the result is a tuple that names the operand too
    return read + written


def _main_bytes(instruction: Instruction) -> int:
    return _main_bytes_of(instruction.arrays)


def _main_bytes_of(arrays: Iterable[HloArray]) -> int:
    return sum(array.num_bytes for array in arrays if array.space == 0)


def _read_by_fusion(number: int, inside: Computation) -> int:
    """Count what a fusion reads of an operand, all of it unless only slices."""
    params = (i for i in inside.order if i.opcode == "parameter")
    return _read_of(next(i for i in params if int(i.arguments) == number))


def _read_of(value: Instruction) -> int:
    total = 0
    for user in dict.fromkeys(value.users):
        if user is value.computation.root and user.opcode == "tuple":
            continue  # the list of the results
        first = user.operands[0] is value
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += user.num_bytes
        elif user.opcode == "bitcast" or _is_bitcast(user):
            total += _read_of(user)
        elif user.opcode == "fusion":  # TPU: a product's operand that is made with it
            total += sum(
                _read_by_fusion(number, user.called[0])
                for number, operand in enumerate(user.operands)
                if operand is value
            )
        elif not (user.opcode == "dynamic-update-slice" and first):
            return value.num_bytes
    return total


def _is_bitcast(fusion: Instruction) -> bool:
    """Tell whether a fusion inside another one only gives its operand another shape."""
    if fusion.opcode != "fusion":
        return False
    return {i.opcode for i in fusion.called[0].order} <= {"parameter", "bitcast"}


def _written_by_fusion(inside: Computation) -> int:
    root = inside.root
    total = 0
    for made in root.operands if root.opcode == "tuple" else [root]:
        size = _main_bytes(made)
        while made.opcode == "bitcast":
            (made,) = made.operands
        if made.opcode in _NOT_WRITTEN:
            continue
        in_place = made.opcode == "dynamic-update-slice" and size
        total += made.operands[1].num_bytes if in_place else size
    return total
