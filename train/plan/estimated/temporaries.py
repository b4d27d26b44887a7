"""Memory that a step needs besides its arguments, itemised, without a compiler.

Three moments are weighed; the one that needs most gives the items.

- The loss: a tile's logits and what they are rounded to, its operand, and the sum over
  all tiles of that operand's gradient, before devices reduce it.
- The layers: the gradients of all layers, and the backward pass of one layer: what its
  passes make (plan/estimated/schedule.py), gathered weights among it, and the gradient
  of the largest before it is scattered; of two on GPUs, where one travels meanwhile.
- The update: the gradients, the largest product of the update, what its loops take and
  give (matrices that travel to be orthogonalised), and of moments that lie in host
  memory those that are on their way.

At the first two lives what the layers kept for their backward pass, the features, and
the sum over microbatches. TPU's tiles pad arrays (`tiled`); there the weights of all
layers are also rounded once, before the loop over them.
"""

import itertools
import math
from collections.abc import Sequence

from model.choices import Attention
from model.params import is_of_layers
from train.plan.estimated.arrays import Array
from train.plan.estimated.local_step import FLOAT32, LocalStep
from train.plan.estimated.operation import Operation, each
from train.plan.estimated.schedule import Schedule
from train.program import Program
from train.sharding import bytes_per_device

_LANES, _SUBLANES = 128, 8


def temporaries(step: LocalStep) -> dict[str, int]:
    """Return bytes by what holds them at the step's peak."""
    held = _held(step)
    moments = [held | _loss(step), held | _layers(step), _update(step)]
    largest = max(moments, key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def tiled(shape: Sequence[int], itemsize: int, platform: str) -> int:
    """Return the bytes of an array, with the padding of TPU's tiles.

    A tile is 8 x 128 elements of the two minor dims. XLA makes those dims minor that
    fill tiles best.
    """
    size = math.prod(shape) * itemsize
    if platform != "tpu" or len(shape) < 2 or not size:
        return size

    def padded(pair: tuple[int, int]) -> float:
        lanes, sublanes = pair
        up = min(_SUBLANES, 1 << (sublanes - 1).bit_length())
        wide = -(-lanes // _LANES) * _LANES / lanes
        return size * wide * (-(-sublanes // up) * up) / sublanes

    return math.ceil(min(map(padded, itertools.permutations(shape, 2))))


def saved_bytes(step: LocalStep, on_host: bool = False) -> int:
    """Return what all layers keep of a microbatch for their backward pass.

    In the host's memory, or else in the device's.
    """
    positions, total = math.prod(dim.size for dim in step.batch[0].dims), 0
    for loop in step.layers:
        if loop.place.is_backward:
            continue
        kept = loop.stacked
        if step.attention.is_cudnn:  # transposed arrays are one
            kept = step.schedules[loop].results[len(loop.carried) :]
        total += (
            loop.place.times
            * loop.trips
            * sum(
                _activation_bytes(step, array)
                for array in dict.fromkeys(kept)
                if array.from_batch and array.size >= positions
                if array.on_host is on_host
            )
        )
    return total


def _held(step: LocalStep) -> dict[str, int]:
    carried = [a for loop in step.layers for a in loop.carried if a.from_batch]
    hidden = max((array.bytes for array in carried), default=0)
    items = {"saved activations": saved_bytes(step), "features": 3 * hidden}
    if step.microbatches > 1:
        items["sum over microbatches"] = _bytes(step, step.params, FLOAT32)
    weights = _weights(step)
    width = min((array.itemsize for array in weights.values()), default=FLOAT32)
    documents = step.program.batch.segment_ids is not None
    if step.attention is Attention.cudnn and documents:
        rows, length = (dim.size for dim in step.batch[0].dims)
        items["attention mask"] = rows * length**2 * width
    if step.platform == "tpu" and width < FLOAT32:
        items["rounded weights"] = sum(
            loop.trips * _bytes(step, list(_used(loop)), width) for loop in step.layers
        )
    return items


def _loss(step: LocalStep) -> dict[str, int]:
    """Count a tile of the loss; none if no loop but that over the layers multiplies."""
    tiles = [loop for loop in step.loops if loop not in step.layers]
    sums = [array for loop in tiles for array in loop.carried]
    for loop in tiles:
        products = [op for op in loop.body if op.flops]
        heads = {a for op in products for a in op.operands if not a.from_batch}
        if heads:
            head = max(heads, key=lambda array: array.size)
            logits = products[0].results[0]
            width = logits.itemsize + head.itemsize
            return {
                "logits of a tile": _bytes(step, [logits], width),
                "rounded head": _bytes(step, [head]),
                "head's gradient": max((_bytes(step, [a]) for a in sums), default=0),
            }
    return {}


def _layers(step: LocalStep) -> dict[str, int]:
    given = {array.source for loop in step.layers for array in loop.operands}
    sizes = sorted(array.size for array in _gathered(step))
    largest = sizes[-1 if step.platform == "tpu" else -2 :]
    return {
        "gradients": _bytes(step, [p for p in step.params if p in given]),
        "gradients to scatter": step.program.execution.numerics.reduce_dtype.itemsize
        * sum(largest),
        "one layer": max(_peak(step, loop) for loop in step.layers[1:]),
    }


def _update(step: LocalStep) -> dict[str, int]:
    """Count gradients, and the largest product, with what its result is added to."""
    products = [
        sum(array.bytes for array in (*op.operands, *op.results, *op.results))
        for op in step.update.each()
        if op.flops
    ]
    loops = sum(
        op.trips * sum(array.bytes for array in (*op.slices, *op.stacked))
        for op in step.update.each()
        if any(inner.flops for inner in op.body)
    )
    return {
        "gradients": _bytes(step, step.params),
        "optimizer's products": max(products, default=0),
        "matrices on the way": loops,
        "moments on the way": _moved_moments(step.program),
    }


def _moved_moments(program: Program) -> int:
    """Count moments in host memory that are on the device at once.

    Those of two layers, or of what is no layer's: XLA:TPU moves all of that at once.
    """
    two, whole = 0, [0]
    for name, leaf in program.host_state.items():
        size = bytes_per_device(leaf)
        if is_of_layers(name):
            two += 2 * size // max(2, leaf.shape[0])
        else:
            whole.append(size)
    on_tpu = program.mesh.devices.flat[0].platform == "tpu"
    return max(two, sum(whole) if on_tpu else max(whole))


def _weights(step: LocalStep) -> dict[Array, Array]:
    """Return a device's part of each layer's matrices, and what products use of it.

    The second is gathered and has the dtype of the product.
    """
    return {own: used for loop in step.layers for own, used in _used(loop).items()}


def _used(loop: Operation) -> dict[Array, Array]:
    return {
        array.source: array
        for op in each(loop.body)
        if op.flops and loop.place.is_backward
        for array in op.operands
        if not array.from_batch and array.source in loop.slices
    }


def _gathered(step: LocalStep) -> list[Array]:
    return [used for own, used in _weights(step).items() if used.size > own.size]


def _peak(step: LocalStep, loop: Operation) -> int:
    """Return what one trip of a loop makes, with a trip of the largest loop inside.

    Of what was kept it copies what its products read; all of it where it computes the
    rest again.
    """
    plan = step.schedules[loop]
    again = any(op.place.recomputed for op in loop.body)
    copied = {a for one in plan.passes if one.operation for a in one.reads}
    made = {array for one in plan.passes for array in one.writes}
    made.update(a for a in loop.slices if again or a in copied)
    made.difference_update(plan.results, _scattered(step, plan))

    def size(array: Array) -> int:
        if array not in made or array.on_host:
            return 0
        gathered = array.size > array.source.size
        if not array.from_batch:
            return array.bytes if gathered else 0
        return _activation_bytes(step, array)

    inside = (_peak(step, inner) for inner in loop.body if inner.body)
    return plan.peak(size) + max(inside, default=0)


def _scattered(step: LocalStep, plan: Schedule) -> set[Array]:
    """Return the gradients of gathered weights, as products make them."""
    sizes = {array.size for array in _gathered(step)}
    made = {a for one in plan.passes if one.operation for a in one.writes}
    return {
        array
        for one in plan.passes
        if not one.operation
        for array in one.reads
        if array in made and array.size in sizes and array.size > one.writes[0].size
    }


def _activation_bytes(step: LocalStep, array: Array) -> int:
    """Return the bytes of an activation; kernels want a head's dim to be minor."""
    shape = [dim.size for dim in array.dims]
    if step.attention is Attention.splash and len(shape) == 4:
        shape[-1] = -(-shape[-1] // _LANES) * _LANES
    return tiled(shape, array.itemsize, step.platform)


def _bytes(step: LocalStep, arrays: Sequence[Array], itemsize: int = 0) -> int:
    shapes = [([dim.size for dim in a.dims], itemsize or a.itemsize) for a in arrays]
    return sum(tiled(shape, width, step.platform) for shape, width in shapes)
