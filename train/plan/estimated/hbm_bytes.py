"""Memory traffic of one device in a step, without a compiler.

Counted as compiled/hbm_bytes.py counts it in a compiled program: what instructions read
and write. Loops go by the passes of plan/estimated/schedule.py:

- A pass that only combines arrays reads what an earlier one read together with that, if
  it could have run then.
- On TPU a value below half of a core's memory stays in it, if it is used again before
  as much passes through; what products read they round themselves.
- Rounding or gathering a weight writes what each product reads; the reduction of its
  gradient reads what a product wrote.
"""

from collections.abc import Iterable

from train.plan.cost import HbmBytes
from train.plan.estimated.arrays import LocalArray
from train.plan.estimated.local_step import FLOAT32, LocalStep
from train.plan.estimated.operation import Operation
from train.plan.estimated.schedule import OperationSchedule
from train.plan.estimated.temporaries import saved_bytes

# Times that what is kept is moved besides where it is used: written by what makes it if
# it fits a core, else copied; GPU: set to zero, copied in, and mostly copied out, if
# layers are a loop.
_KEPT, _KEPT_LARGE, _KEPT_GPU = 0.25, 1.5, 4.25


def estimate_hbm_bytes(step: LocalStep, state_bytes: int, core: int) -> HbmBytes:
    """Count what a device reads and writes in a step.

    `state_bytes` is its part of the state, `core` the bytes of a core's own memory,
    that values may stay in; 0: none.
    """
    products = others = 0.0
    for loop, plan in step.schedules.items():
        inside = _trip(loop, plan, core)
        trips = loop.place.times * loop.trips
        products += trips * inside[0]
        others += trips * inside[1]
    large = any(a.from_batch and a.bytes >= core / 2 for a in step.layers[0].stacked)
    kept = _KEPT_LARGE if large else _KEPT
    if step.platform == "gpu":
        looped = step.program.config.model.layer_unroll != -1
        kept = _KEPT_GPU if looped else 0.0
    others += kept * saved_bytes(step)
    gradients = FLOAT32 * sum(param.size for param in step.params)
    if step.microbatches > 1:
        others += 3 * gradients  # each is added to the sum
    # The state is read and written, gradients read by the update.
    others = step.microbatches * others + 2 * state_bytes + gradients
    products *= step.microbatches
    for op in step.update.each():
        if op.flops:
            products += _sum(op.operands) + op.results[0].bytes
            others += _around(op)
    return HbmBytes(int(products), int(others))


def _trip(loop: Operation, plan: OperationSchedule, core: int) -> tuple[float, float]:
    """Count one trip of a loop: by products, and by all else."""
    elsewhere = set[LocalArray]()
    if loop.place.in_layers and not loop.place.is_backward:
        elsewhere = set(loop.stacked)  # saved_bytes
    made, seen, touched = (
        dict[LocalArray, int](),
        dict[LocalArray, int](),
        dict[LocalArray, int](),
    )
    rounded = _rounded(plan) if core else {}
    clock, spilled, moved = 0, set[LocalArray](), {True: 0.0, False: 0.0}
    for number, one in enumerate(plan.passes):
        reads = [rounded.get(a, a) for a in one.reads]
        writes = [a for a in one.writes if a not in elsewhere]
        elementwise = one.operation is None
        if elementwise and (not writes or writes[0] in rounded):
            continue
        multiplies = one.operation is not None and one.operation.flops > 0
        widest = max((a.bytes for a in reads if a.from_batch), default=0)
        ready = max((made.get(a, -1) for a in reads), default=-1)
        large = [a for a in reads if a.from_batch and 2 * a.bytes >= widest]
        shared = elementwise and all(seen.get(a, -1) > ready for a in large)
        for array in reads:
            stays = array in touched and clock - touched[array] <= core / 2
            stays = (stays and array.bytes < core / 2) or array.on_host
            if array.from_batch and not (shared or stays):
                moved[multiplies] += array.bytes
                spilled.add(array)
            elif multiplies and not array.from_batch:
                moved[multiplies] += array.bytes
                moved[False] += array.bytes if loop.place.in_layers else 0
        for array in writes:
            result = array in plan.results
            if result or array.bytes >= core / 2 if array.from_batch else multiplies:
                moved[multiplies] += array.bytes
            if result and multiplies and loop.place.in_layers:
                moved[False] += 0 if array in loop.carried else array.bytes
        for array in (*reads, *one.writes):
            clock += array.bytes if array.from_batch else 0
            touched[array] = clock
        made |= dict.fromkeys(one.writes, number)
        seen |= dict.fromkeys(reads if elementwise else (), number)
    spilled &= {a for a in made if a not in plan.results and a.bytes < core / 2}
    return moved[True], moved[False] + _sum(spilled)


def _rounded(plan: OperationSchedule) -> dict[LocalArray, LocalArray]:
    """Return what only products read, and round themselves, and what it is made of."""
    others = set(plan.results)
    for one in plan.passes:
        if not (one.operation and one.operation.name == "dot_general"):
            others.update(one.reads)
    result = dict[LocalArray, LocalArray]()
    for one in plan.passes:
        wide = [a for a in one.reads if 2 * a.bytes > one.writes[0].bytes]
        rounds = len(wide) == 1 and wide[0].bytes > one.writes[0].bytes
        if one.operation is None and rounds and not others & {*one.writes}:
            result |= dict.fromkeys(one.writes, wide[0])
    return result


def _around(op: Operation) -> float:
    """Count what is done with a product of the update: it is added up, and rounded.

    An operand that was gathered was written for it.
    """
    result = op.results[0]
    if any(result.size < array.size for array in op.operands):
        return 0.0
    gathered = [a for a in op.operands if a.size > a.source.size]
    return 3 * result.bytes + _sum(gathered)


def _sum(arrays: Iterable[LocalArray]) -> int:
    return sum(array.bytes for array in arrays)
