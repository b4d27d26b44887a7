"""The step of one device: the walks over its gradients and its update."""

import functools
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
from train.program import Program

FLOAT32 = 4
_FORWARD = "splash_mha_fwd"


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step.

    gradients: the operations of one of its `microbatches`.
    update: the operations after all microbatches.
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
        """The kernel of attention."""
        return self.program.execution.attention

    @property
    def loops(self) -> list[Operation]:
        """The loops of the gradients; for that over a pipeline's stages those in it."""
        loops = [op for op in self.gradients.operations if op.body]
        inside = [op.body if op.place.in_stages else [op] for op in loops]
        return [op for ops in inside for op in ops if op.body]

    @property
    def layers(self) -> list[Operation]:
        """The loops over the layers, forward and backward."""
        return [loop for loop in self.loops if loop.place.in_layers]

    @property
    def flops(self) -> Flops:
        """The FLOPs of matrix products and attention kernels."""
        products = sum(op.place.times * op.flops for op in self.update.each())
        whole = attention = eight_bits = grouped = 0.0
        backward = sum(n for name, n in SPLASH_PRODUCTS.items() if name != _FORWARD)
        for op in (*self.gradients.each(), *self.gradients.in_branches):
            flops = self.microbatches * op.place.times * op.flops
            if not op.is_kernel:
                products += flops
                grouped += flops if op.name == "ragged_dot_general" else 0.0
                if all(array.itemsize == 1 for array in op.operands[:2]):
                    eight_bits += flops
                continue
            part = op.part
            if self.attention.is_cudnn:  # Splash was traced instead of it
                again = CUDNN_PRODUCTS[True] / backward
                flops *= again if op.place.is_backward else 1.0
                part = _cudnn_part(op)
            whole += flops
            attention += flops * part
        return Flops(products, attention, whole, eight_bits=eight_bits, grouped=grouped)


def _cudnn_part(kernel: Operation) -> float:
    """Return the part of scores that cuDNN computes where Splash was traced.

    Half of a causal square, into however few blocks Splash cuts that; all where a
    ring's queries see another device's keys, which are as many. Where a window reaches
    over all blocks there are more keys than queries.
    """
    computed, blocks = computed_blocks(kernel.place.scope) or (0, 1)
    whole = computed == blocks and kernel.square
    return 1.0 if whole else min(kernel.part, 0.5)


def local_step(program: Program) -> LocalStep:
    """Walk a program, without lowering it."""
    platform, sizes = program.mesh.devices.flat[0].platform, program.mesh.shape
    microbatches = program.config.train.accumulation_steps
    params, batch = _parts(program.state.params), _parts(program.batch)
    for rows in batch:
        first, *rest = rows.dims
        rows.dims = (first._replace(size=first.size // microbatches), *rest)
        rows.from_batch = True
    gradients = Walk(sizes, platform)
    loss, *results = gradients.run(trace_gradients(program), [*params, *batch])
    gradients.sending.reduce(loss, ())
    # After the gradients come the loads of experts, which are replicated.
    for result, param in zip(results, params, strict=False):
        gradients.sending.reduce(result, param.axes, param.label)
    each = [
        e._replace(count=e.count * times, payload=e.payload * times)
        for e in gradients.sending.exchanges
        for times in [1 if e.once else microbatches]
    ]
    leaves, tree = jax.tree.flatten((program.state.params, program.state.optimizer))
    update = _walk_update(program.optimizer, tuple(leaves), tree)
    exchanges = [*each, *update.sending.exchanges]
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
    """Walk an update; it is the same whatever the layers recompute."""
    mesh = leaves[0].sharding.mesh
    params, state = jax.tree.unflatten(tree, leaves)
    update = Walk(mesh.shape, mesh.devices.flat[0].platform)
    own, jaxpr = _parts(params), trace_update(optimizer, params, state)
    results = update.run(jaxpr, [*_parts(params), *_parts(state), *own])
    for result, param in zip(results[: len(own)], own, strict=True):
        spec = [dim.axes for dim in param.dims]
        update.sending.lay_out(result, spec, update.place, strict=True)
    return update


def _parts(tree: Any) -> list[LocalArray]:
    """Return a device's parts of the arrays of the state or the batch."""
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
