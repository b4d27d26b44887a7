"""The memory that a step needs besides its arguments, without a compiler.

Only the arrays are known that must exist together at one of three points in time: while
the loss is computed, in the backward pass of the layers, and before the update. Their
sizes are exact, so their sum is a lower bound. What a compiler adds (a layer's other
activations, buffers of collectives, copies and padding) is not part of it.
"""

from model.choices import Attention
from model.params import is_of_layers, named
from train.plan.estimated.arrays import LocalArray, Operation, flatten_loops
from train.plan.estimated.local_step import LocalStep, local_step
from train.program import Program
from train.sharding import bytes_per_device

# The fraction of the operands and results of a layer's products that exists at once.
# Source: the compiled steps of tests/train/plan/estimated/compiled_figures.json.
_AT_ONCE = 0.4
_LANES = 128  # A TPU pads the last dim of an array to a multiple of its lanes.


def least_temporaries(step: LocalStep) -> dict[str, int]:
    """Return the bytes of temporaries that exist at the step's peak, by name."""
    largest = max(_temporaries(step), key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def temporaries_by_depth(program: Program) -> int:
    """Return bytes that grow with the number of layers as compiled temporaries do.

    Their constant part may be wrong. To find the point in time of the peak, a layer's
    other activations are estimated.
    """
    step = local_step(program)
    loss, layers, update = (sum(items.values()) for items in _temporaries(step))
    return max(loss, layers + max(map(_activation_bytes, step.layers)), update)


def saved_bytes(step: LocalStep, on_host: bool = False) -> int:
    """Return the bytes that all layers save for the backward pass of a microbatch.

    `on_host` selects the bytes in host memory instead of those in device memory.
    """
    total = 0
    for loop in step.layers:
        # A copy of the same size, such as a transpose, counts once.
        distinct = {(array.origin, array.bytes): array for array in loop.stacked}
        saved = [
            _padded_bytes(step, array)
            for array in distinct.values()
            if array.from_batch and array.size >= step.tokens
            if array.on_host is on_host and not loop.position.is_backward
        ]
        total += loop.position.count * loop.trips * sum(saved)
    return total // step.microbatches


def _padded_bytes(step: LocalStep, array: LocalArray) -> int:
    """Return the bytes of an activation; Splash pads the head dim of its operands."""
    if step.program.execution.attention is Attention.splash and len(array.dims) == 4:
        head_dim = array.dims[-1].size
        return array.bytes // head_dim * (-(-head_dim // _LANES) * _LANES)
    return array.bytes


def _temporaries(step: LocalStep) -> list[dict[str, int]]:
    """Return the temporaries while the loss, the layers' gradients and updates run."""
    gradients = {
        name: bytes_per_device(leaf) for name, leaf in named(step.program.state.params)
    }
    of_layers = sum(size for name, size in gradients.items() if is_of_layers(name))
    held = {"saved activations": saved_bytes(step)}
    if step.microbatches > 1:
        held["sum over microbatches"] = step.gradient_bytes
    return [
        held | _loss_items(step),
        held | {"gradients": of_layers} | _weight_items(step),
        {"gradients": sum(gradients.values())},
    ]


def _loss_items(step: LocalStep) -> dict[str, int]:
    """Return the logits and the head of a tile or piece of the loss.

    A loss in pieces of the vocabulary also saves the exponentials of all logits.
    """
    for loop in step.body:
        products = [op for op in loop.body if op.work]
        if loop.position.section == "loss" and products:
            logits, width = products[0].results[0], products[0].operands[0].itemsize
            features = max(a.bytes for a in loop.operands if a.from_batch)
            tables = [a for a in loop.operands if not a.from_batch]
            stacked = [a.bytes for a in loop.stacked if a.size == logits.size]
            return {
                "features and their gradient": 2 * features,
                "logits": logits.bytes,
                "rounded head": max(a.bytes for a in tables if a.itemsize == width),
                "exponentials": loop.trips * sum(stacked),
            }
    return {}


def _weight_items(step: LocalStep) -> dict[str, int]:
    """Return the weights of layers as products of the backward pass use them.

    These are the gathered weights of one layer, in the dtype of products. XLA:TPU
    rounds weights that are not gathered before the loop, those of all layers at once.
    """
    on_tpu = step.program.mesh.devices.flat[0].platform == "tpu"
    gathered = rounded = 0
    for loop in step.layers:
        if loop.position.is_backward:
            products = [op for op in flatten_loops(loop.body) if "dot" in op.name]
            operands = [a for op in products for a in op.operands if not a.from_batch]
            weights = {array.origin: array for array in operands}.values()
            is_larger = [a.bytes for a in weights if a.size > a.origin.size]
            gathered = max(gathered, sum(is_larger))
            total = sum(array.bytes for array in weights)
            rounded += loop.trips * (total - sum(is_larger)) * on_tpu
    return {"gathered weights": gathered, "rounded weights": rounded}


def _activation_bytes(loop: Operation) -> int:
    """Estimate the bytes of a layer's activations that exist at once."""
    products = [op for op in flatten_loops(loop.body) if op.work]
    arrays = {array for op in products for array in (*op.operands, *op.results)}
    sizes = (a.bytes for a in arrays if a.from_batch and not a.on_host)
    return int(_AT_ONCE * sum(sizes))
