"""What one device does in one step: the walks over its gradients and its update."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from model.axes import mesh_axes
from model.config import Attention
from model.params import named
from train.plan.estimated.arrays import Array, Dim
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.operation import Operation
from train.plan.estimated.trace import trace_gradients, trace_update
from train.plan.estimated.walk import Walk
from train.program import Program


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step.

    gradients: of one of its `microbatches`; update: behind them.
    params: its part of each parameter; batch: of each field of a microbatch.
    exchanges: of the whole step.
    """

    platform: str
    attention: Attention
    documents: bool
    microbatches: int
    gradients: Walk
    update: Walk
    params: list[Array]
    batch: list[Array]
    exchanges: list[Exchange]

    @property
    def layers(self) -> list[Operation]:
        """The loops over the layers of the gradients, forward and backward."""
        loops = [op for op in self.gradients.operations if op.body]
        return [loop for loop in loops if loop.place.in_layers]

    @property
    def tiles(self) -> list[Operation]:
        """Other loops, forward and backward."""
        loops = [op for op in self.gradients.operations if op.body]
        return [loop for loop in loops if not loop.place.in_layers]

    @functools.cached_property
    def weights(self) -> dict[Array, Array]:
        """Of each layer's parameters that multiply: a device's part, and what it uses.

        The second is gathered and has the dtype of the product.
        """
        return {
            array.source: array
            for loop in self.layers
            for op in loop.body
            if op.flops and loop.place.is_backward
            for array in op.operands
            if not array.from_batch and array.source in loop.slices
        }


def local_step(program: Program) -> LocalStep:
    """Walk a program, without lowering it."""
    platform = program.mesh.devices.flat[0].platform
    microbatches = program.config.train.accumulation_steps
    params, batch = _parts(program.state.params), _parts(program.batch)
    for rows in batch:
        first, *rest = rows.dims
        rows.dims = (first._replace(size=first.size // microbatches), *rest)
        rows.from_batch = True
    gradients = Walk(program.mesh.shape, platform)
    loss, *results = gradients.run(trace_gradients(program), [*params, *batch])
    gradients.sending.reduce(loss, ())
    for result, param in zip(results, params, strict=True):
        gradients.sending.reduce(result, param.axes, param.label)
    each = [
        replace(e, count=e.count * microbatches, payload=e.payload * microbatches)
        for e in gradients.sending.exchanges
    ]
    update = Walk(program.mesh.shape, platform)
    grads, state = _parts(program.state.params), _parts(program.state.optimizer)
    results = update.run(trace_update(program), [*grads, *state, *params])
    for result, param in zip(results[: len(params)], params, strict=True):
        spec = [dim.axes for dim in param.dims]
        update.sending.lay_out(result, spec, update.place, is_result=True)
    return LocalStep(
        platform=platform,
        attention=program.how.attention,
        documents=program.batch.segment_ids is not None,
        microbatches=microbatches,
        gradients=gradients,
        update=update,
        params=params,
        batch=batch,
        exchanges=[*each, *update.sending.exchanges],
    )


def _parts(tree: Any) -> list[Array]:
    return [_part(leaf, label) for label, leaf in named(tree)]


def _part(leaf: Any, label: str) -> Array:
    """Give a device's part of an array of the state or the batch."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    shape, spec = sharding.shard_shape(leaf.shape), sharding.spec
    sizes = sharding.mesh.shape
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    dims = tuple(
        Dim(size, tuple(a for a in mesh_axes(entry) if sizes[a] > 1))
        for size, entry in zip(shape, entries, strict=True)
    )
    return Array(dims, leaf.dtype.itemsize, label=label)
