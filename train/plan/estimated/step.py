"""Estimate the cost and memory of a step from shapes and shardings, without a compiler.

Of the memory, a lower bound is known: the arrays that must exist together while the
loss is computed, in the backward pass of the layers, or before the update. What a
compiler adds (a layer's other activations, buffers, copies, padding) is not counted.

`benchmarks/estimates.py` compares estimates with the compiler's figures.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import jax

from model.choices import Attention
from model.params import is_of_layers, named
from train.core.layout import bytes_per_device
from train.plan.cost import (
    ESTIMATED,
    CollectiveTotal,
    HbmBytes,
    SectionCost,
    StepCost,
    add_totals,
)
from train.plan.estimated.arrays import LocalArray, Operation, flatten_loops
from train.plan.estimated.collectives import Exchange, phases
from train.plan.estimated.local_step import LocalStep, local_step
from train.plan.memory import LOWER_BOUND, DeviceMemory, Figure, device_memory
from train.plan.sections import OTHERS, SECTIONS
from train.resolve.program import ConfiguredProgram

# The fraction of the operands and results of a layer's products that exists at once.
# Source: the compiled steps of tests/train/plan/estimated/compiled_figures.json.
_AT_ONCE = 0.4
_LANES = 128  # A TPU pads the last dim of an array to a multiple of its lanes.


def estimate_step(
    program: ConfiguredProgram, step: LocalStep | None = None
) -> StepCost:
    """Return the estimated FLOPs, bytes and collectives of one device in a step."""
    step = step or local_step(program)
    outside_layers = [e for e in step.exchanges if not e.position.in_layers]
    moments = sum(map(bytes_per_device, program.host_state.values()))
    hbm_bytes = _hbm_bytes(step)
    sections = list[SectionCost]()
    for name in SECTIONS:
        exchanges = [e for e in step.exchanges if e.position.section == name]
        sent = _totals(exchanges, program)
        sections.append(SectionCost(name, step.flops[name], hbm_bytes[name], sent))
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(sections),
        outside_layers=_totals(outside_layers, program, by_use=True),
        host_bytes=moments + step.microbatches * saved_bytes(step, on_host=True),
        how=ESTIMATED,
    )


def estimate_memory(
    program: ConfiguredProgram, step: LocalStep | None = None
) -> DeviceMemory:
    """Return the least memory that one device needs: state, batch and temporaries."""
    exact = device_memory(program)
    step = step or local_step(program)
    sizes = least_temporaries(step)
    temporaries = sum(sizes.values())
    host = dict(exact.host)
    if saved := saved_bytes(step, on_host=True):
        host["temporaries"] = Figure(saved, LOWER_BOUND)
    return dataclasses.replace(
        exact,
        parts=exact.parts | {"temporaries": Figure(temporaries, LOWER_BOUND)},
        needed=Figure(exact.held + temporaries, LOWER_BOUND),
        temporaries={name: Figure(size, LOWER_BOUND) for name, size in sizes.items()},
        host=host,
    )


def _hbm_bytes(step: LocalStep) -> defaultdict[str, HbmBytes]:
    """Estimate the main-memory traffic of one device, by section.

    The estimate has no fitted constant. It assumes that all operations between two
    products or kernels are fused into one pass over memory. So each product or kernel
    reads its operands and writes its results, and the pass before or after it moves
    each activation again, and rounds or gathers a layer's weights. XLA:TPU keeps some
    arrays in a core's own memory, so its compiled program moves less.
    """
    by_section = defaultdict[str, HbmBytes](HbmBytes)
    for op in step.operations:
        if op.work or op.name in ("gather", "scatter-add"):
            operands = {*op.operands}
            results = {*op.results}
            passed = {a for a in operands | results if a.from_batch}
            passed |= operands if op.position.in_layers else set()
            count = op.position.count
            moved = round(count * sum(array.bytes for array in operands | results))
            others = round(count * sum(array.bytes for array in passed))
            if op.work:
                hbm_bytes = HbmBytes(moved, others)
            else:
                hbm_bytes = HbmBytes(0, moved + others)
            by_section[op.position.section] += hbm_bytes
    state_bytes = sum(map(bytes_per_device, jax.tree.leaves(step.program.state)))
    # The update reads the gradients, and reads and writes the state. With microbatches,
    # each gradient and the running sum are read, and the new sum is written.
    accesses = 1 + 3 * step.microbatches if step.microbatches > 1 else 1
    by_section[OTHERS] += HbmBytes(0, 2 * state_bytes + accesses * step.gradient_bytes)
    return by_section


def _totals(
    exchanges: Iterable[Exchange], program: ConfiguredProgram, by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum exchanges by axes, network, kind and links, and optionally by use."""
    mesh = program.mesh
    steps = program.execution.placement.axis_steps
    has_experts = program.config.model.expert_layers > 0
    totals = [total for e in exchanges for total in phases(e, mesh, steps, has_experts)]
    if not by_use:
        totals = [dataclasses.replace(total, serves="") for total in totals]
    return add_totals(totals)


def least_temporaries(step: LocalStep) -> dict[str, int]:
    """Return the bytes of temporaries that exist at the step's peak, by name."""
    largest = max(_temporaries(step), key=lambda items: sum(items.values()))
    return {name: size for name, size in largest.items() if size}


def temporaries_by_depth(program: ConfiguredProgram) -> int:
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
        total += round(loop.position.count * loop.trips * sum(saved))
    return total // step.microbatches


def _padded_bytes(step: LocalStep, array: LocalArray) -> int:
    """Return the bytes that a saved activation takes.

    Splash pads the head dim of its operands. Without a loop over layers, XLA:GPU need
    not save the two float32 arrays of a norm: it computes them again from the input.
    """
    execution = step.program.execution
    itemsize = execution.numerics.activation_dtype.itemsize
    if execution.layer_unroll == -1 and array.itemsize > itemsize:
        return array.size * itemsize // 2
    if execution.attention.kernel is Attention.splash and len(array.dims) == 4:
        head_dim = array.dims[-1].size
        return array.bytes // head_dim * (-(-head_dim // _LANES) * _LANES)
    return array.bytes


def _temporaries(step: LocalStep) -> list[dict[str, int]]:
    """Return the temporaries while the loss, the layers' gradients and updates run."""
    params = named(step.program.state.params)
    gradients = {name: bytes_per_device(param) for name, param in params}
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
            logits = products[0].results[0]
            width = products[0].operands[0].itemsize
            features = [a.bytes for a in loop.operands if a.from_batch]
            tables = [a for a in loop.operands if not a.from_batch]
            heads = [a.bytes for a in tables if a.itemsize == width]
            stacked = [a.bytes for a in loop.stacked if a.size == logits.size]
            return {
                "features and their gradient": 2 * max(features, default=0),
                "logits": logits.bytes,
                "rounded head": max(heads, default=0),
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
