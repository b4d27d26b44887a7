"""Memory that a step needs besides its arguments, itemised, without a compiler.

Three moments are weighed; the one that needs most gives the items.

- `loss`: a tile's logits and what they are rounded to, its operand, and the sum over
  all tiles of that operand's gradient, before devices reduce it.
- `layers`: the gradients of all layers, that of the loss, which XLA reduces behind the
  loop over the layers, and the backward pass of one layer: the weights that it gathers
  (on TPU the next one's travel meanwhile), their gradients before they are scattered,
  and what its passes make (plan/estimated/schedule.py).
- `update`: the gradients, and the largest product of the update.

At the first two lives what the layers kept for their backward pass, the features, and
the sum over microbatches. TPU's tiles pad arrays (`tiled`); there the weights of all
layers are also rounded once, before the loop over them.
"""

import math
from collections.abc import Iterable

from model.config import Attention
from train.plan.estimated.arrays import Array
from train.plan.estimated.local_step import LocalStep
from train.plan.estimated.operation import Operation
from train.plan.estimated.schedule import schedule

_LANES, _SUBLANES = 128, 8
FLOAT32 = 4


def temporaries(step: LocalStep) -> dict[str, int]:
    """Return bytes by what holds them at the step's peak."""
    held = _held(step)
    moments = [held | _loss(step), held | _layers(step), _update(step)]
    return max(moments, key=lambda items: sum(items.values()))


def tiled(shape: Iterable[int], itemsize: int, platform: str) -> int:
    """Return the bytes of an array, with the padding of TPU's tiles.

    A tile is 8 x 128 elements of the two minor dims. XLA makes those dims minor that
    fill tiles best.
    """
    dims = list(shape)
    size = math.prod(dims) * itemsize
    if platform != "tpu" or len(dims) < 2 or not size:
        return size

    def padded(lanes: int, sublanes: int) -> float:
        up = min(_SUBLANES, 1 << (sublanes - 1).bit_length())
        wide = -(-lanes // _LANES) * _LANES / lanes
        return size * wide * (-(-sublanes // up) * up) / sublanes

    pairs = [(a, b) for i, a in enumerate(dims) for j, b in enumerate(dims) if i != j]
    return math.ceil(min(padded(*pair) for pair in pairs))


def saved_bytes(step: LocalStep) -> int:
    """Return what all layers keep of a microbatch for their backward pass."""
    forward, *_ = step.layers
    kept = forward.stacked
    if step.attention is Attention.cudnn:  # transposed arrays are one
        kept = schedule(forward.body, kept, transposes=False).results
    positions = math.prod(dim.size for dim in step.batch[0].dims)
    return forward.trips * sum(
        _bytes(step, array)
        for array in dict.fromkeys(kept)
        if array.from_batch and array.size >= positions
    )


def _bytes(step: LocalStep, array: Array) -> int:
    """Return the bytes of an activation; kernels want a head's dim to be minor."""
    shape = [dim.size for dim in array.dims]
    if step.attention is Attention.splash and len(shape) == 4:
        shape[-1] = -(-shape[-1] // _LANES) * _LANES
    return tiled(shape, array.itemsize, step.platform)


def _held(step: LocalStep) -> dict[str, int]:
    carried = [a for loop in step.layers for a in loop.carried if a.from_batch]
    hidden = max((array.bytes for array in carried), default=0)
    items = {"saved activations": saved_bytes(step), "features": 3 * hidden}
    if step.microbatches > 1:
        items["sum over microbatches"] = _in_float32(step, step.params)
    weights = step.weights
    width = min((array.itemsize for array in weights.values()), default=FLOAT32)
    if step.attention is Attention.cudnn and step.documents:
        rows, length = (dim.size for dim in step.batch[0].dims)
        items["attention mask"] = rows * length**2 * width
    if step.platform == "tpu" and width < FLOAT32:
        trips = step.layers[0].trips
        items["rounded weights"] = trips * sum(
            _tiled(step, own, used.itemsize) for own, used in weights.items()
        )
    return items


def loss_products(step: LocalStep) -> tuple[Array, Array, int] | None:
    """Return a tile's logits, the weight that makes them, and how many tiles there are.

    None if no loop but that over the layers multiplies.
    """
    for loop in step.tiles:
        linear = [op for op in loop.body if op.flops]
        linear = [op for op in linear if not all(a.from_batch for a in op.operands)]
        if linear:
            logits = max((op.results[0] for op in linear), key=lambda array: array.size)
            (head,) = {a for a in linear[0].operands if not a.from_batch}
            return logits, head, loop.trips
    return None


def _loss(step: LocalStep) -> dict[str, int]:
    found = loss_products(step)
    if found is None:
        return {}
    logits, head, _ = found
    return {
        "logits of a tile": _tiled(step, logits, logits.itemsize + head.itemsize),
        "rounded head": _tiled(step, head, head.itemsize),
        "head's gradient": _loss_gradient(step),
    }


def _loss_gradient(step: LocalStep) -> int:
    sums = [a for loop in step.tiles for a in loop.carried]
    return max((_tiled(step, array, array.itemsize) for array in sums), default=0)


def _layers(step: LocalStep) -> dict[str, int]:
    given = {array for loop in step.layers for array in loop.operands}
    weights = [p for p in step.params if p in given]
    gathered = [used for own, used in step.weights.items() if used.size > own.size]
    held = sum(array.bytes for array in gathered)
    return {
        "gradients": _in_float32(step, weights),
        "head's gradient": _loss_gradient(step),
        "gathered weights": (2 if step.platform == "tpu" else 1) * held,
        "gradients to scatter": FLOAT32 * sum(array.size for array in gathered),
        "one layer": max(_peak(step, loop) for loop in step.layers[1:]),
    }


def _peak(step: LocalStep, loop: Operation) -> int:
    """Return what one trip of a loop makes.

    Of what was kept it copies what its products read; all of it where it computes the
    rest again.
    """
    transposes = step.attention is not Attention.cudnn
    plan = schedule(loop.body, [*loop.carried, *loop.stacked], transposes)
    again = any(op.place.recomputed for op in loop.body)
    copied = {a for one in plan.passes if one.operation for a in one.reads}
    made = {array for one in plan.passes for array in one.writes}
    made.update(a for a in loop.slices if again or a in copied)
    made.difference_update(plan.results)

    def size(array: Array) -> int:
        return _bytes(step, array) if array.from_batch and array in made else 0

    return plan.peak(size)


def _update(step: LocalStep) -> dict[str, int]:
    """Count gradients, and the largest product, with what its result is added to."""
    items = {"gradients": _in_float32(step, step.params)}
    largest = max(
        (
            sum(array.bytes for array in op.operands) + 2 * op.results[0].bytes
            for op in step.update.each()
            if op.flops
        ),
        default=0,
    )
    return items | ({"optimizer's products": largest} if largest else {})


def _in_float32(step: LocalStep, arrays: Iterable[Array]) -> int:
    return sum(_tiled(step, array, FLOAT32) for array in arrays)


def _tiled(step: LocalStep, array: Array, itemsize: int) -> int:
    return tiled((dim.size for dim in array.dims), itemsize, step.platform)
