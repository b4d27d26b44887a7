"""The memory that a step needs besides its arguments, without a compiler.

Only the arrays are known that must exist together at one of three points in time: while
the loss is computed, in the backward pass of the layers, and before the update. Their
sizes are exact, so their sum is a lower bound. What a compiler adds (a layer's other
activations, buffers of collectives, copies and padding) is not part of it.
"""

import jax

from model.choices import Attention
from model.params import is_of_layers, named
from train.plan.estimated.arrays import LocalArray, Operation, flatten_loops
from train.plan.estimated.local_step import LocalStep, local_step
from train.program import Program
from train.sharding import bytes_per_device

FLOAT32 = 4  # bytes
# The fraction of the operands and results of a layer's products that exists at once.
# Source: the compiled steps of tests/train/plan/estimated/compiled_figures.json.
_AT_ONCE = 0.4
_LANES = 128  # A TPU pads the last dim of an array to a multiple of its lanes.


def least_temporaries(step: LocalStep) -> dict[str, int]:
    """Return the bytes of temporaries that exist at the step's peak, by name."""
    points = [_loss_items(step), _layer_items(step), _update_items(step)]
    largest = max(points, key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def temporaries_by_depth(program: Program) -> int:
    """Return bytes that grow with the number of layers as compiled temporaries do.

    Their constant part may be wrong. To find the point in time of the peak, a layer's
    other activations are estimated.
    """
    step = local_step(program)
    points = [_loss_items(step), _layer_items(step), _update_items(step)]
    loss, layers, update = (sum(items.values()) for items in points)
    return max(loss, layers + max(map(_activation_bytes, step.layers)), update)


def saved_bytes(step: LocalStep, on_host: bool = False) -> int:
    """Return the bytes that all layers save for the backward pass of a microbatch.

    `on_host` selects the bytes in host memory instead of those in device memory.
    """
    total = 0
    for loop in step.layers:
        if loop.position.is_backward:
            continue
        # A copy of the same size, such as a transpose, counts once.
        distinct = {(array.origin, array.bytes): array for array in loop.stacked}
        saved = (
            _padded_bytes(step, array)
            for array in distinct.values()
            if array.from_batch and array.size >= step.tokens
            if array.on_host is on_host
        )
        total += loop.position.count * loop.trips * sum(saved)
    return total // step.microbatches


def _padded_bytes(step: LocalStep, array: LocalArray) -> int:
    """Return the bytes of an activation; Splash pads the head dim of its operands."""
    if step.program.execution.attention is Attention.splash and len(array.dims) == 4:
        head_dim = array.dims[-1].size
        return array.bytes // head_dim * (-(-head_dim // _LANES) * _LANES)
    return array.bytes


def _held(step: LocalStep) -> dict[str, int]:
    """Return what exists while the loss and the backward pass are computed."""
    held = {"saved activations": saved_bytes(step)}
    if step.microbatches > 1:
        params = jax.tree.leaves(step.program.state.params)
        sizes = (bytes_per_device(leaf) // leaf.dtype.itemsize for leaf in params)
        held["sum over microbatches"] = FLOAT32 * sum(sizes)
    return held


def _loss_items(step: LocalStep) -> dict[str, int]:
    """Return the logits and the head of a tile or piece of the loss.

    A loss in pieces of the vocabulary also saves the exponentials of all logits.
    """
    carried = [a.bytes for loop in step.layers for a in loop.carried if a.from_batch]
    items = _held(step) | {"features and their gradient": 2 * max(carried, default=0)}
    for loop in step.gradients:
        products = [op for op in loop.body if op.flops]
        heads = [a for op in products for a in op.operands if not a.from_batch]
        if loop.position.section != "loss" or not heads:
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
    gathered = rounded = 0
    for loop in step.layers:
        if not loop.position.is_backward:
            continue
        used = {
            array.origin: array
            for op in flatten_loops(loop.body)
            if op.flops
            for array in op.operands
            if array.origin in loop.slices and not array.from_batch
        }
        sizes = [(a.bytes, a.size > a.origin.size) for a in used.values()]
        gathered = max(gathered, sum(size for size, is_larger in sizes if is_larger))
        rounded += loop.trips * sum(size for size, is_larger in sizes if not is_larger)
    on_tpu = step.program.mesh.devices.flat[0].platform == "tpu"
    gradients = (
        bytes_per_device(leaf)
        for name, leaf in named(step.program.state.params)
        if is_of_layers(name)
    )
    return _held(step) | {
        "gradients": sum(gradients),
        "gathered weights": gathered,
        "rounded weights": rounded if on_tpu else 0,
    }


def _update_items(step: LocalStep) -> dict[str, int]:
    leaves = jax.tree.leaves(step.program.state.params)
    return {"gradients": sum(map(bytes_per_device, leaves))}


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
