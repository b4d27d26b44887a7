"""Estimate the memory that a step needs besides its arguments, without a compiler.

The estimate is the largest sum at three points in time:

- the loss: the logits of a tile, the rounded head, and the sum of the head's gradient;
  or the logits of a piece, the rounded head, and the exponentials of all logits;
- the layers: the gradients of all layers, the gathered weights of one layer, the
  gradients that are being scattered, and a part of one layer's activations;
- the update: the gradients, the optimizer's largest product, the matrices that a loop
  reads and makes, and the moments that move between host and device.

At the first two points the saved activations, the features, and the sum over
microbatches exist too. Saved activations, weights, gradients and logits are exact. Of a
layer's other activations, a fixed fraction is assumed to exist at once (`_AT_ONCE`).
"""

import itertools
import math
from collections.abc import Iterable, Sequence

from model.choices import Attention
from model.params import is_of_layers
from train.plan.estimated.arrays import LocalArray
from train.plan.estimated.local_step import FLOAT32, LocalStep
from train.plan.estimated.operation import SHAPES, Operation, flatten_loops
from train.program import Program
from train.sharding import bytes_per_device

# The fraction of the operands and results of a layer's products that exists at once.
# Source: the compiled steps of tests/train/plan/estimated/compiled_figures.json.
_AT_ONCE = 0.4
_LANES, _SUBLANES = 128, 8


def temporaries(step: LocalStep) -> dict[str, int]:
    """Return the bytes of the temporaries at the step's peak, by name."""
    held = _held_throughout(step)
    sums = [held | _loss_items(step), held | _layer_items(step), _update_items(step)]
    largest = max(sums, key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def tiled_bytes(shape: Sequence[int], itemsize: int, platform: str) -> int:
    """Return the bytes of an array, including the padding of a TPU's tiles.

    A tile is 8 x 128 elements of the two minor dims. XLA chooses the minor dims that
    fill tiles best.
    """
    size = math.prod(shape) * itemsize
    if platform != "tpu" or len(shape) < 2 or not size:
        return size

    def padded(pair: tuple[int, int]) -> float:
        lanes, sublanes = pair
        tile = min(_SUBLANES, 1 << (sublanes - 1).bit_length())
        padding = -(-lanes // _LANES) * _LANES / lanes
        return size * padding * (-(-sublanes // tile) * tile) / sublanes

    return math.ceil(min(map(padded, itertools.permutations(shape, 2))))


def saved_bytes(step: LocalStep, on_host: bool = False) -> int:
    """Return the bytes that all layers save for the backward pass of a microbatch.

    `on_host` selects the bytes in host memory instead of those in device memory.
    """
    positions = math.prod(dim.size for dim in step.batch[0].dims)
    total = 0
    for loop in step.layers:
        if not loop.position.is_backward:
            saved = (
                _activation_bytes(step, array)
                for array in _saved_arrays(loop, step.attention)
                if array.from_batch and array.size >= positions
                if array.on_host is on_host
            )
            total += loop.position.count * loop.trips * sum(saved)
    return total


def _saved_arrays(loop: Operation, attention: Attention) -> Iterable[LocalArray]:
    """Return the distinct arrays that a loop saves in each trip.

    cuDNN accepts operands with any order of dims. So with cuDNN an array and its
    transpose are saved as one.
    """
    if not attention.is_cudnn:
        return dict.fromkeys(loop.stacked)
    originals = dict[LocalArray, LocalArray]()
    for operation in loop.body:
        operand = operation.operands[0] if operation.operands else None
        for result in operation.results:
            if operand and operation.name in SHAPES and result.bytes == operand.bytes:
                originals[result] = originals.get(operand, operand)
    return {originals.get(array, array): None for array in loop.stacked}


def _held_throughout(step: LocalStep) -> dict[str, int]:
    carried = [a for loop in step.layers for a in loop.carried if a.from_batch]
    hidden = max((array.bytes for array in carried), default=0)
    items = {"saved activations": saved_bytes(step), "features": 3 * hidden}
    if step.microbatches > 1:
        items["sum over microbatches"] = _sum_bytes(step, step.params, FLOAT32)
    weights = [used for loop in step.layers for used in _weights(loop)]
    width = min((array.itemsize for array in weights), default=FLOAT32)
    if step.attention is Attention.cudnn and step.program.batch.segment_ids is not None:
        rows, length = (dim.size for dim in step.batch[0].dims)
        items["attention mask"] = rows * length**2 * width
    if step.platform == "tpu" and width < FLOAT32:
        # XLA:TPU rounds all layers before the loop, except weights that are gathered
        # (`WeightPlacement.gather_as`).
        items["rounded weights"] = sum(
            loop.trips * _sum_bytes(step, [used.source], width)
            for loop in step.layers
            for used in _weights(loop)
            if used.size == used.source.size
        )
    return items


def _loss_items(step: LocalStep) -> dict[str, int]:
    """Return the items of a tile or piece of the loss; {} if only layers multiply."""
    tiles = [loop for loop in step.loops if loop not in step.layers]
    carried = [array for loop in tiles for array in loop.carried]
    stacked = [a for loop in tiles for a in loop.stacked if len(a.dims) > 2]
    for loop in tiles:
        products = [op for op in loop.body if op.flops]
        heads = {a for op in products for a in op.operands if not a.from_batch}
        if heads:
            head = max(heads, key=lambda array: array.size)
            logits = products[0].results[0]
            width = logits.itemsize + head.itemsize
            # A piece of the head is a slice of what the loop reads.
            tables = (a for a in loop.operands if not a.from_batch)
            table = max((head, *tables), key=lambda array: array.size)
            items = {
                "logits at once": _sum_bytes(step, [logits], width),
                "rounded head": _sum_bytes(step, [table], head.itemsize),
            }
            if table.size > head.size:
                exps = loop.trips * max(_sum_bytes(step, [a]) for a in stacked)
                return items | {"exponentials": exps}
            sums = (_sum_bytes(step, [array]) for array in carried)
            return items | {"head's gradient": max(sums, default=0)}
    return {}


def _layer_items(step: LocalStep) -> dict[str, int]:
    in_layers = {array.source for loop in step.layers for array in loop.operands}
    weights = [_weights(loop) for loop in step.layers]
    gathered = {
        used.source: used
        for arrays in weights
        for used in arrays
        if used.size > used.source.size
    }.values()
    # GPUs reduce one gradient while they compute the next.
    num_reduced = 1 if step.platform == "tpu" else 2
    largest = sorted(array.size for array in gathered)[-num_reduced:]
    itemsize = step.program.execution.numerics.reduce_dtype.itemsize
    return {
        "gradients": _sum_bytes(step, [p for p in step.params if p in in_layers]),
        "gathered weights": max(
            _sum_bytes(step, [a for a in gathered if a in arrays]) for arrays in weights
        ),
        "gradients to scatter": itemsize * sum(largest),
        "one layer": max(_layer_bytes(step, loop) for loop in step.layers),
    }


def _layer_bytes(step: LocalStep, loop: Operation) -> int:
    """Estimate the bytes of a layer's activations that exist at once."""
    arrays = {
        array
        for operation in flatten_loops(loop.body)
        if operation.flops
        for array in (*operation.operands, *operation.results)
        if array.from_batch and not array.on_host
    }
    return int(_AT_ONCE * sum(_activation_bytes(step, array) for array in arrays))


def _update_items(step: LocalStep) -> dict[str, int]:
    """Return the items of the update.

    The matrices on the way are stacks that a loop with products reads and makes.
    """
    operations = list(step.update.flatten())
    products = [
        sum(array.bytes for array in (*op.operands, *op.results, *op.results))
        for op in operations
        if op.flops
    ]
    matrices = sum(
        op.trips * sum(array.bytes for array in (*op.slices, *op.stacked))
        for op in operations
        if any(inner.flops for inner in op.body)
    )
    return {
        "gradients": _sum_bytes(step, step.params),
        "optimizer's products": max(products, default=0),
        "matrices on the way": matrices,
        "moments on the way": _moved_moments(step.program),
    }


def _moved_moments(program: Program) -> int:
    """Count the bytes of host moments that are on the device at once.

    These are the moments of two layers, or those of a parameter outside the layers if
    they are larger. XLA:TPU moves the moments of all parameters outside the layers at
    once.
    """
    two_layers, other_sizes = 0, [0]
    for name, leaf in program.host_state.items():
        size = bytes_per_device(leaf)
        if is_of_layers(name):
            two_layers += 2 * size // max(2, leaf.shape[0])
        else:
            other_sizes.append(size)
    on_tpu = program.mesh.devices.flat[0].platform == "tpu"
    return max(two_layers, sum(other_sizes) if on_tpu else max(other_sizes))


def _weights(loop: Operation) -> list[LocalArray]:
    """Return a layer's matrices as used by the products of a backward loop.

    They may be gathered, and have the dtype of the product. Returns [] for a forward
    loop.
    """
    if not loop.position.is_backward:
        return []
    used = {
        array.source: array
        for operation in flatten_loops(loop.body)
        if operation.flops
        for array in operation.operands
        if not array.from_batch and array.source in loop.slices
    }
    return list(used.values())


def _activation_bytes(step: LocalStep, array: LocalArray) -> int:
    """Return the bytes of an activation; Splash needs the head dim to be minor."""
    shape = [dim.size for dim in array.dims]
    if step.attention is Attention.splash and len(shape) == 4:
        shape[-1] = -(-shape[-1] // _LANES) * _LANES
    return tiled_bytes(shape, array.itemsize, step.platform)


def _sum_bytes(step: LocalStep, arrays: Sequence[LocalArray], itemsize: int = 0) -> int:
    shapes = [([dim.size for dim in a.dims], itemsize or a.itemsize) for a in arrays]
    return sum(tiled_bytes(shape, width, step.platform) for shape, width in shapes)
