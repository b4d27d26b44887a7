"""The memory that a step needs besides its arguments, without a compiler.

Only the arrays are known that must exist together at one of three points in time: while
the loss is computed, in the backward pass of the layers, and before the update. Their
sizes are exact, so their sum is a lower bound. What a compiler adds (a layer's other
activations, buffers of collectives, copies and padding) is not part of it.
"""

import math
from collections.abc import Iterable

from model.choices import Attention
from train.plan.estimated.arrays import LocalArray
from train.plan.estimated.local_step import FLOAT32, LocalStep, local_step
from train.plan.estimated.operation import SHAPES, Operation, flatten_loops
from train.program import Program

# The fraction of the operands and results of a layer's products that exists at once.
# Source: the compiled steps of tests/train/plan/estimated/compiled_figures.json.
_AT_ONCE = 0.4
_LANES = 128  # A TPU pads the last dim of an array to a multiple of its lanes.


def least_temporaries(step: LocalStep) -> dict[str, int]:
    """Return the bytes of temporaries that exist at the step's peak, by name."""
    sums = [_loss_items(step), _layer_items(step), _update_items(step)]
    largest = max(sums, key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def temporaries_by_depth(program: Program) -> int:
    """Return bytes that grow with the number of layers as compiled temporaries do.

    Their constant part may be wrong. To find the point in time of the peak, two more
    sizes are included: the sum of the head's gradient over tiles of the loss, and an
    estimate of a layer's other activations.
    """
    step = local_step(program)
    loss, layers = _loss_items(step), _layer_items(step)
    sums = (a.bytes for op in step.loops if op not in step.layers for a in op.carried)
    head_bytes = 0 if "exponentials" in loss else max(sums, default=0)
    layer_bytes = max(map(_activation_bytes, step.layers))
    return max(
        sum(loss.values()) + head_bytes,
        sum(layers.values()) + layer_bytes,
        sum(_update_items(step).values()),
    )


def saved_bytes(step: LocalStep, on_host: bool = False) -> int:
    """Return the bytes that all layers save for the backward pass of a microbatch.

    `on_host` selects the bytes in host memory instead of those in device memory.
    """
    positions = math.prod(dim.size for dim in step.batch[0].dims)
    total = 0
    for loop in step.layers:
        if not loop.position.is_backward:
            saved = (
                _layout_bytes(step, array)
                for array in _saved_arrays(loop)
                if array.from_batch and array.size >= positions
                if array.on_host is on_host
            )
            total += loop.position.count * loop.trips * sum(saved)
    return total // step.microbatches


def _layout_bytes(step: LocalStep, array: LocalArray) -> int:
    """Return the bytes of an activation; Splash pads the head dim of its operands."""
    if step.program.execution.attention is Attention.splash and len(array.dims) == 4:
        head_dim = array.dims[-1].size
        return array.bytes // head_dim * (-(-head_dim // _LANES) * _LANES)
    return array.bytes


def _saved_arrays(loop: Operation) -> Iterable[LocalArray]:
    """Return the distinct arrays that a loop saves in each trip.

    An array and its transpose count as one.
    """
    originals = dict[LocalArray, LocalArray]()
    for operation in loop.body:
        operand = operation.operands[0] if operation.operands else None
        for result in operation.results:
            if operand and operation.name in SHAPES and result.bytes == operand.bytes:
                originals[result] = originals.get(operand, operand)
    return {originals.get(array, array): None for array in loop.stacked}


def _held(step: LocalStep) -> dict[str, int]:
    """Return what exists while the loss and the backward pass are computed."""
    held = {"saved activations": saved_bytes(step)}
    if step.microbatches > 1:
        parameters = sum(param.size for param in step.params)
        held["sum over microbatches"] = FLOAT32 * parameters
    return held


def _loss_items(step: LocalStep) -> dict[str, int]:
    """Return the logits and the head of a tile or piece of the loss.

    A loss in pieces of the vocabulary also saves the exponentials of all logits.
    """
    carried = [a for loop in step.layers for a in loop.carried if a.from_batch]
    hidden_bytes = max((array.bytes for array in carried), default=0)
    items = _held(step) | {"features and their gradient": 2 * hidden_bytes}
    for loop in step.loops:
        products = [op for op in loop.body if op.flops]
        heads = [a for op in products for a in op.operands if not a.from_batch]
        if loop in step.layers or not heads:
            continue
        head, logits = max(heads, key=lambda a: a.size), products[0].results[0]
        tables = [a for a in loop.operands if not a.from_batch]
        table = max([head, *tables], key=lambda array: array.size)
        items |= {"logits": logits.bytes, "rounded head": table.size * head.itemsize}
        if table.size > head.size:
            stacked = (a.bytes for a in loop.stacked if len(a.dims) > 2)
            items["exponentials"] = loop.trips * max(stacked)
        break
    return items


def _layer_items(step: LocalStep) -> dict[str, int]:
    """Return the gradients of all layers, and weights as the backward pass uses them.

    These are the gathered weights of one layer, in the dtype of products. XLA:TPU
    rounds weights that are not gathered before the loop, those of all layers at once.
    """
    backward = [loop for loop in step.layers if loop.position.is_backward]
    in_layers = {array.source for loop in backward for array in loop.operands}
    gathered = rounded = 0
    for loop in backward:
        used = {
            array.source: array
            for op in flatten_loops(loop.body)
            if op.flops
            for array in op.operands
            if array.source in loop.slices and not array.from_batch
        }
        sizes = [(a.bytes, a.size > a.source.size) for a in used.values()]
        gathered = max(gathered, sum(size for size, is_larger in sizes if is_larger))
        rounded += loop.trips * sum(size for size, is_larger in sizes if not is_larger)
    on_tpu = step.program.mesh.devices.flat[0].platform == "tpu"
    return _held(step) | {
        "gradients": sum(param.bytes for param in step.params if param in in_layers),
        "gathered weights": gathered,
        "rounded weights": rounded if on_tpu else 0,
    }


def _update_items(step: LocalStep) -> dict[str, int]:
    return {"gradients": sum(param.bytes for param in step.params)}


def _activation_bytes(loop: Operation) -> int:
    """Estimate the bytes of a layer's activations that exist at once."""
    arrays = {
        array
        for op in flatten_loops(loop.body)
        if op.flops
        for array in (*op.operands, *op.results)
        if array.from_batch and not array.on_host
    }
    return int(_AT_ONCE * sum(array.bytes for array in arrays))
