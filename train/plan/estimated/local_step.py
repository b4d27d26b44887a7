"""Walk the gradients and the update of one device's step."""

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from model.axes import mesh_axes
from model.choices import Attention
from model.params import named
from train.optimizer.update import Optimizer
from train.plan.cost import CUDNN_PRODUCTS, SPLASH_PRODUCTS, Flops, computed_blocks
from train.plan.estimated.arrays import Dim, LocalArray
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.operation import Operation
from train.plan.estimated.trace import trace_gradients, trace_update
from train.plan.estimated.walk import Walk
from train.plan.sections import OTHERS
from train.program import Program

FLOAT32 = 4  # bytes
_FORWARD = "splash_mha_fwd"


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step.

    gradients: the walk over one of the `microbatches`.
    update: the walk over the update, after all microbatches.
    params: the local part of each parameter.
    batch: the local part of each field of a microbatch.
    exchanges: the collectives of the whole step.
    """

    program: Program
    platform: str
    microbatches: int
    gradients: Walk
    update: Walk
    params: list[LocalArray]
    batch: list[LocalArray]
    exchanges: list[Exchange]

    @property
    def attention(self) -> Attention:
        """The implementation of attention."""
        return self.program.execution.attention

    @property
    def loops(self) -> list[Operation]:
        """The loops of the gradients; inner loops stand for a loop over stages."""
        loops = [op for op in self.gradients.operations if op.body]
        loop_lists = [op.body if op.position.in_stages else [op] for op in loops]
        return [op for ops in loop_lists for op in ops if op.body]

    @property
    def layers(self) -> list[Operation]:
        """The loops over the layers, forward and backward."""
        return [loop for loop in self.loops if loop.position.in_layers]

    @property
    def flops(self) -> defaultdict[str, Flops]:
        """The FLOPs of matrix products and attention kernels, by section."""
        products = sum(op.position.count * op.flops for op in self.update.flatten())
        by_section = defaultdict(Flops, {OTHERS: Flops(products)})
        for op in (*self.gradients.flatten(), *self.gradients.branch_operations):
            if op.flops:
                by_section[op.position.section] += self._gradient_flops(op)
        return by_section

    def _gradient_flops(self, op: Operation) -> Flops:
        """Return the FLOPs of an operation of the gradients in all microbatches."""
        flops = self.microbatches * op.position.count * op.flops
        if not op.is_kernel:
            has_eight_bits = all(array.itemsize == 1 for array in op.operands[:2])
            return Flops(
                flops,
                eight_bits=flops if has_eight_bits else 0.0,
                grouped=flops if op.name == "ragged_dot_general" else 0.0,
            )
        fraction = op.computed_fraction
        if self.attention.is_cudnn:  # the traced kernel is Splash's
            backward = sum(n for name, n in SPLASH_PRODUCTS.items() if name != _FORWARD)
            kernel_ratio = CUDNN_PRODUCTS[True] / backward
            flops *= kernel_ratio if op.position.is_backward else 1.0
            fraction = _cudnn_fraction(op)
        return Flops(attention=flops * fraction, whole_attention=flops)


def _cudnn_fraction(kernel: Operation) -> float:
    """Return the fraction of the scores that cuDNN computes, from a Splash kernel.

    cuDNN computes half of a causal square, however coarse Splash's blocks are. In a
    ring's step without a mask, cuDNN computes all scores, and Splash's scope states
    that it computes all blocks. A window's scope can state the same, but then there are
    more keys than queries (model/attention/splash.py), so `is_square` is False.
    """
    computed, blocks = computed_blocks(kernel.position.scope) or (0, 1)
    computes_all = computed == blocks and kernel.is_square
    return 1.0 if computes_all else min(kernel.computed_fraction, 0.5)


def local_step(program: Program) -> LocalStep:
    """Trace a program, without lowering, and return its local step."""
    platform, sizes = program.mesh.devices.flat[0].platform, program.mesh.shape
    microbatches = program.config.train.accumulation_steps
    params, batch = _local_arrays(program.state.params), _local_arrays(program.batch)
    for field in batch:
        rows, *other_dims = field.dims
        field.dims = (rows._replace(size=rows.size // microbatches), *other_dims)
        field.from_batch = True
    gradients = Walk(sizes, platform)
    loss, *results = gradients.run(trace_gradients(program), [*params, *batch])
    gradients.recorder.reduce(loss, ())
    # The results after the gradients are the experts' loads, which are replicated.
    for result, param in zip(results, params, strict=False):
        gradients.recorder.reduce(result, param.axes, param.label)
    gradient_exchanges = [
        e._replace(count=e.count * factor, payload=e.payload * factor)
        for e in gradients.recorder.exchanges
        for factor in [1 if e.once else microbatches]
    ]
    leaves, tree = jax.tree.flatten((program.state.params, program.state.optimizer))
    update = _walk_update(program.optimizer, tuple(leaves), tree)
    exchanges = [*gradient_exchanges, *update.recorder.exchanges]
    return LocalStep(
        program,
        platform,
        microbatches=microbatches,
        gradients=gradients,
        update=update,
        params=params,
        batch=batch,
        exchanges=exchanges,
    )


@functools.lru_cache(maxsize=16)
def _walk_update(optimizer: Optimizer, leaves: tuple, tree: Any) -> Walk:
    """Walk an update. It is cached, because it does not depend on the remat policy."""
    mesh = leaves[0].sharding.mesh
    params, state = jax.tree.unflatten(tree, leaves)
    update = Walk(mesh.shape, mesh.devices.flat[0].platform)
    local_params, jaxpr = _local_arrays(params), trace_update(optimizer, params, state)
    arguments = [*_local_arrays(params), *_local_arrays(state), *local_params]
    results = update.run(jaxpr, arguments)
    for result, param in zip(results[: len(local_params)], local_params, strict=True):
        entries = [dim.axes for dim in param.dims]
        update.recorder.reshard(result, entries, update.position, strict=True)
    return update


def _local_arrays(tree: Any) -> list[LocalArray]:
    """Return the local arrays of a tree, with their names as labels."""
    arrays = list[LocalArray]()
    for label, leaf in named(tree):
        assert isinstance(leaf.sharding, NamedSharding)
        spec, sizes = leaf.sharding.spec, leaf.sharding.mesh.shape
        shape = leaf.sharding.shard_shape(leaf.shape)
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        dims = tuple(
            Dim(size, tuple(a for a in mesh_axes(entry) if sizes[a] > 1))
            for size, entry in zip(shape, entries, strict=True)
        )
        arrays.append(LocalArray(dims, leaf.dtype.itemsize, label=label))
    return arrays
