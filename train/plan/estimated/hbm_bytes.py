"""Estimate the main-memory traffic of one device in a step, without a compiler.

The estimate has no fitted constant. It assumes that all operations between two matrix
products or kernels are fused into one pass over memory. So each product or kernel
reads its operands and writes its results, and the pass before or after it moves each of
these arrays again. XLA:TPU keeps some arrays in a core's own memory, so its compiled
program moves less. `benchmarks/estimates.py` compares estimated and compiled traffic.
"""

from collections import defaultdict
from collections.abc import Iterable

from train.plan.cost import HbmBytes
from train.plan.estimated.arrays import LocalArray
from train.plan.estimated.local_step import FLOAT32, LocalStep
from train.plan.estimated.operation import Operation, flatten_loops
from train.plan.sections import OTHERS

_INDEXED = ("gather", "scatter-add")


def estimate_hbm_bytes(step: LocalStep, state_bytes: int) -> defaultdict[str, HbmBytes]:
    """Return the bytes that a device reads and writes in each section of a step.

    `state_bytes` is the size of the local state.
    """
    by_section = defaultdict[str, HbmBytes](HbmBytes)
    for op in flatten_loops(step.gradients.operations):
        if op.flops or op.name in _INDEXED:
            count = op.position.count
            by_section[op.position.section] += HbmBytes(
                count * _sum_bytes(_arrays_of(op)), count * _pass_bytes(op)
            )
    gradients = FLOAT32 * sum(param.size for param in step.params)
    # The update reads the gradients, and reads and writes the state. With microbatches,
    # each gradient and the running sum are read, and the new sum is written.
    others = 2 * state_bytes + gradients
    others += 3 * step.microbatches * gradients if step.microbatches > 1 else 0
    products = [op for op in flatten_loops(step.update.operations) if op.flops]
    # Accumulating and rounding a result takes three accesses.
    others += 3 * sum(op.results[0].bytes for op in products)
    by_section[OTHERS] += HbmBytes(
        sum(_sum_bytes(_arrays_of(op)) for op in products), others
    )
    return by_section


def _arrays_of(operation: Operation) -> list[LocalArray]:
    return [*dict.fromkeys(operation.operands), *operation.results]


def _pass_bytes(operation: Operation) -> int:
    """Return the bytes of the passes before and after an operation.

    These passes make or use activations, and round or gather a layer's weights.
    """
    activations = _sum_bytes(a for a in _arrays_of(operation) if a.from_batch)
    weights = (a for a in dict.fromkeys(operation.operands) if not a.from_batch)
    in_layers = operation.position.in_layers
    return activations + (_sum_bytes(weights) if in_layers else 0)


def _sum_bytes(arrays: Iterable[LocalArray]) -> int:
    return sum(array.bytes for array in arrays)
