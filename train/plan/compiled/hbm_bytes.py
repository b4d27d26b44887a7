"""Estimate the main-memory traffic of a compiled program.

The estimate assumes that no cache keeps data from one instruction to the next.
"""

from collections.abc import Iterable

from train.plan.compiled.flops import multiplies
from train.plan.compiled.hlo import Computation, Executed, HloArray, Instruction
from train.plan.cost import HbmBytes

_NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "call", "conditional", "opt-barrier", "partition-id", "replica-id"),
}
# Instructions of a fusion, some in a nested fusion, that only change the layout.
_VIEWS = {"parameter", "bitcast", "copy"}
# Results that a fusion lists but does not write: operands that pass through, and on TPU
# the result of a collective that overlaps several fusions.
_NOT_WRITTEN = ("parameter", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")
# TPU: an uninitialised buffer, and slices that are already adjacent.
NO_TRAFFIC_TARGETS = ("AllocateBuffer", "ConcatBitcast")


def count_memory_traffic(all_executed: Iterable[Executed]) -> HbmBytes:
    """Return the memory traffic of products and of all other instructions."""
    total = HbmBytes()
    for executed in all_executed:
        num_bytes = round(executed.count * memory_traffic(executed.instruction))
        in_products = num_bytes if multiplies(executed.instruction) else 0
        total += HbmBytes(products=in_products, others=num_bytes - in_products)
    return total


def memory_traffic(instruction: Instruction) -> int:
    """Estimate the bytes that an instruction reads from and writes to main memory.

    A slice reads only its result, and an in-place update writes only the update, also
    inside a fusion. Arrays in a TPU core's own memory cost nothing.
    """
    opcode = instruction.opcode
    operands = instruction.operands
    is_free = opcode in _NO_TRAFFIC or instruction.target in NO_TRAFFIC_TARGETS
    if is_free or opcode.endswith("-done"):
        return 0
    if opcode in ("fusion", "fusion-start"):
        body = instruction.called[0]
        read = sum(
            min(_main_bytes(operand.arrays), _bytes_read_of(body.parameter(number)))
            for number, operand in enumerate(operands)
        )
        return read + _written_by_fusion(body)
    if opcode == "call-start":  # the work of a TPU's SparseCores
        body = instruction.called[0]
        if body.root.opcode not in _NOT_WRITTEN:
            return sum(map(memory_traffic, body.order))
    read = sum(_main_bytes(operand.arrays) for operand in operands)
    written = _main_bytes(instruction.arrays)
    if opcode in ("dynamic-slice", "gather", "slice"):
        read = min(written, read)
    elif opcode == "dynamic-update-slice":
        read = written = min(_main_bytes(operands[1].arrays), written)
    elif opcode == "copy-start":
        written = _main_bytes(instruction.arrays[:1])
    elif opcode == "slice-start":
        result = instruction.arrays[len(operands)]
        read = min(read, result.num_bytes)
        written = _main_bytes([result])
    elif opcode.endswith("-start"):
        written = 0  # the result is a tuple that lists the operand too
    return read + written


def _main_bytes(arrays: Iterable[HloArray]) -> int:
    return sum(array.num_bytes for array in arrays if array.space == 0)


def _bytes_read_of(value: Instruction) -> int:
    """Count the bytes of a value that its users read: all bytes, unless only sliced."""
    total = 0
    for user in dict.fromkeys(value.users):
        if user is value.computation.root and user.opcode == "tuple":
            continue  # the list of the fusion's results
        opcodes = {inner.opcode for inner in user.nested} or {user.opcode}
        is_first_operand = user.operands[0] is value
        if user.opcode in ("dynamic-slice", "slice", "gather") and is_first_operand:
            total += user.num_bytes
        elif opcodes <= _VIEWS:
            total += _bytes_read_of(user)
        elif user.opcode == "fusion":  # TPU: fused into a product as its operand
            total += sum(
                _bytes_read_of(user.called[0].parameter(number))
                for number, operand in enumerate(user.operands)
                if operand is value
            )
        elif not (user.opcode == "dynamic-update-slice" and is_first_operand):
            return value.num_bytes
    return total


def _written_by_fusion(body: Computation) -> int:
    root = body.root
    total = 0
    for result in root.operands if root.opcode == "tuple" else [root]:
        size = _main_bytes(result.arrays)
        while result.opcode == "bitcast":
            (result,) = result.operands
        if result.opcode not in _NOT_WRITTEN:
            in_place = result.opcode == "dynamic-update-slice" and size
            total += result.operands[1].num_bytes if in_place else size
    return total
