"""Memory traffic of one device in a step, without a compiler.

Counted as compiled/hbm_bytes.py counts it in a compiled program: what instructions read
and write, as if no cache held anything from one to the next.

- Layers are read and written by the passes of plan/estimated/schedule.py. Rounding or
  gathering a weight writes what each product reads; the reduction of its gradient reads
  what a product wrote.
- What is kept is copied into a stack of all layers; XLA's GPU compiler also zeroes that
  first, and copies out of it what it reads.
- Where half of a core's memory holds a layer's largest value (TPU), values go from one
  instruction to the next inside it. Those that wait leave it once and come back once.
"""

from collections.abc import Iterable

from model.config import Attention
from train.plan.cost import HbmBytes
from train.plan.estimated.arrays import Array
from train.plan.estimated.local_step import LocalStep
from train.plan.estimated.operation import Operation
from train.plan.estimated.schedule import Pass, Schedule, schedule
from train.plan.estimated.temporaries import FLOAT32, loss_products, saved_bytes

_SOON = 2  # passes that a value waits in a core's own memory


def count_hbm_bytes(step: LocalStep, state_bytes: int, core_memory: int) -> HbmBytes:
    """Count what a device reads and writes in a step.

    Args:
        step: of the device.
        state_bytes: of its part of the state.
        core_memory: bytes of a core's own, that values may stay in; 0: none.
    """
    products, others = _loss(step, core_memory)
    for loop in step.layers:
        inside = _layer(step, loop, core_memory)
        products, others = products + inside[0], others + inside[1]
    others += (4 if step.platform == "gpu" else 2) * saved_bytes(step)
    gradients = FLOAT32 * sum(param.size for param in step.params)
    if step.microbatches > 1:
        others += 3 * gradients  # each is added to the sum
    products, others = step.microbatches * products, step.microbatches * others
    # The state is read and written, gradients read by their norm and by the update.
    others += 2 * state_bytes + 2 * gradients
    for op in step.update.each():
        if op.flops:
            products += _sum(op.operands) + op.results[0].bytes
            others += _around(op)
    return HbmBytes(int(products), int(others))


def _layer(step: LocalStep, loop: Operation, core: int) -> tuple[float, float]:
    """Count one loop over the layers: by products, and by all else."""
    transposes = step.attention is not Attention.cudnn
    plan = schedule(loop.body, [*loop.carried, *loop.stacked], transposes)
    values = [a for one in plan.passes for a in one.writes if a.from_batch]
    values = [a for a in values if a not in plan.results]
    stays = max(a.bytes for a in values) < core / 2
    products, others = 0.0, 0.0 if stays else _elementwise(step, loop, plan)
    for one in plan.passes:
        operation = one.operation
        if operation is None:
            continue
        if operation.is_kernel:
            products += _kernel(one)
        elif operation.flops:
            weights = [a for a in one.reads if not a.from_batch]
            results = [a for a in one.writes if a in plan.results]
            results = [a for a in results if a not in loop.carried]
            products += _sum(weights) + _sum(results)
            others += _sum(weights) + _sum(results)
            activations = [a for a in (*one.reads, *one.writes) if a.from_batch]
            activations = [a for a in activations if a not in results]
            products += 0 if stays else _sum(activations)
    others += _waiting(loop, plan, set(values)) if stays else 0
    return loop.trips * products, loop.trips * others


def _waiting(loop: Operation, plan: Schedule, values: set[Array]) -> float:
    """Count values that leave a core and come back, and what it computes again from."""
    passes = [one for one in plan.passes if any(a.from_batch for a in one.writes)]
    numbers = {id(one): number for number, one in enumerate(passes)}
    last = {a: numbers[id(one)] for one in passes for a in one.reads}
    moved = sum(
        a.bytes
        for one in passes
        for a in one.writes
        if a in values and last.get(a, 0) > numbers[id(one)] + _SOON
    )
    if any(op.place.recomputed for op in loop.body):
        moved += _sum(a for a in loop.slices if a.from_batch)
    return 2 * moved


def _elementwise(step: LocalStep, loop: Operation, plan: Schedule) -> float:
    """Count the passes between products.

    What only keeps an array for the backward pass is done with what makes it, and what
    reads the same as an earlier pass, if that could have done it, together with that.
    """
    made, passes = dict[Array, int](), list[tuple[int, set[Array]]]()
    total = 0.0
    for number, one in enumerate(plan.passes):
        made.update(dict.fromkeys(one.writes, number))
        writes = [a for a in one.writes if a not in loop.stacked]
        reads = {a for a in one.reads if a.from_batch}
        if one.operation or not writes or not reads:
            continue
        largest = max(a.bytes for a in reads)
        large = {a for a in reads if 2 * a.bytes >= largest}
        newest = max(made.get(a, -1) for a in reads)
        total += _sum(writes)
        if any(newest <= before and large <= others for before, others in passes):
            continue
        total += _sum(reads)
        passes.append((number, large | set(one.writes)))
    return total


def _kernel(one: Pass) -> float:
    """Count a kernel's heads; its sums of a query each are small."""
    arrays = [a for a in (*one.reads, *one.writes) if a.from_batch and len(a.dims) > 3]
    width = arrays[0].itemsize
    return _sum(a for a in arrays if a.itemsize == width)


def _loss(step: LocalStep, core: int) -> tuple[float, float]:
    """Count the loss: logits are float32, and each tile reads the head and adds to it.

    Logits are written and read by their sums; two products read their cotangent. XLA's
    TPU compiler makes the maximum with the logits, and the cotangent where it is read.
    The GPU's reads logits for each of three sums, and writes the cotangent, rounded.
    """
    found = loss_products(step)
    if found is None:
        return 0.0, 0.0
    logits, head, trips = found
    moved = trips * head.size * (2 * head.itemsize + 2 * FLOAT32)
    if logits.bytes < core / 2:
        return moved, 0.0
    size, width = trips * logits.size, head.itemsize
    if step.platform == "gpu":
        sums = 3 * FLOAT32 + FLOAT32 + width
        return moved + size * (FLOAT32 + 2 * width), size * sums
    return moved + size * 3 * FLOAT32, size * FLOAT32


def _around(op: Operation) -> float:
    """Count what is done with a product of the update: it is added up, and rounded.

    An operand that was gathered was written for it.
    """
    result = op.results[0]
    if any(result.size < array.size for array in op.operands):
        return 0.0
    gathered = [a for a in op.operands if a.size > a.source.size]
    return 3 * result.bytes + _sum(gathered)


def _sum(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays)
