"""Trace the real program to jaxprs: the gradients of a microbatch, and the update.

The layouts of a search differ in shapes and share most equations. So gradients are
traced once for each remat policy, on the smallest possible mesh, and
plan/estimated/walk.py inserts the local sizes. Nothing is lowered.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

from data.batches import Batch
from model.axes import mesh_axes
from model.choices import Attention, Grouped
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import abstract_gpt, params_of
from train.config import Remat, TrainConfig
from train.execution import batch_shards
from train.hardware.interconnect import num_slices_along
from train.optimizer.update import Optimizer
from train.program import Program
from train.step import make_gradients

_KERNEL_TILE = 128  # positions in a tile of the traced kernel
_ROWS = 2  # traced rows of a device if no equation depends on their number


def trace_gradients(program: Program) -> ClosedJaxpr:
    """Trace the function (parameters, batch) -> (loss, gradients) of a microbatch."""
    config, execution = program.config, program.execution
    placement = execution.placement
    if execution.attention.is_cudnn:
        # cuDNN's kernel cannot be traced without cuDNN. Splash is traced instead: it
        # reads, writes and saves the same arrays.
        execution = execution._replace(attention=Attention.splash)
    # The kernels of grouped products are not traced either: XLA's own grouped product
    # reads and writes the same arrays.
    execution = execution._replace(grouped=Grouped.ragged)
    tile = _KERNEL_TILE if execution.attention is Attention.splash else 1
    sizes = program.mesh.shape
    if not _is_sharded_over_dcn(program):
        # Each collective is traced as one step. `phases` splits it for the real mesh.
        placement = replace(placement, axis_steps=())
        sizes = {axis: _traced_size(axis, program) for axis in sizes}
    axis_types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types)
    method, kernel = program.execution.context_attention, program.execution.attention
    if program.batch_shards.sequence > 1 and method.has_ring_order(kernel):
        tile *= 2 * program.batch_shards.sequence
    length = -(-config.data.sequence_length // tile) * tile
    rows = _ROWS
    if config.model.expert_layers or program.mesh.shape["pipeline"] > 1:
        # Experts sort the local tokens, and stages split the local rows.
        num_microbatches = config.train.accumulation_steps
        rows = config.data.batch_size // (program.batch_shards.rows * num_microbatches)
    rows *= batch_shards(placement.rules, sizes).rows
    array = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return _trace_gradients(
        config.model,
        execution._replace(placement=replace(placement, mesh=mesh)),
        # The remat policy is in the execution. One microbatch is traced.
        replace(config.train, accumulation_steps=1, remat=Remat.none, num_steps=1),
        jax.tree.map(lambda _: array, program.batch),
    )


@functools.lru_cache(maxsize=64)
def _trace_gradients(
    config: ModelConfig, execution: Execution, train: TrainConfig, batch: Batch
) -> ClosedJaxpr:
    model = abstract_gpt(config)
    step = make_gradients(model, execution, train)
    return jax.make_jaxpr(step)(params_of(model), batch)


def trace_update(optimizer: Optimizer, params: Any, state: Any) -> ClosedJaxpr:
    """Trace the function (parameters, state, gradients) -> (parameters, state)."""
    # Where the moments are, and whether layers take turns, changes no product.
    optimizer = replace(optimizer, by_layer=False)
    params, state = jax.tree.map(
        lambda leaf: leaf.update(sharding=None), (params, state)
    )

    def update(params: Any, state: Any, grads: Any) -> Any:
        return optimizer.update(grads, jnp.float32(1), state, params, jnp.int32(0))[:2]

    return jax.make_jaxpr(update)(params, state, params)


def _is_sharded_over_dcn(program: Program) -> bool:
    """Return whether TPU slices shard a parameter, other than by experts or stages.

    In that case the groups of gathers and scatters depend on the sizes of all axes.
    """
    mesh, rules = program.mesh, program.execution.placement.rules
    entries = [rule for name, rule in rules.params if name not in ("experts", "layers")]
    axes = {axis for entry in entries for axis in mesh_axes(entry)}
    on_tpu = program.execution.placement.platform == "tpu"
    return on_tpu and any(num_slices_along(mesh, [axis]) > 1 for axis in axes)


def _traced_size(axis: str, program: Program) -> int:
    """Return the size of a mesh axis in the trace: 2, if the equations are the same.

    An axis of size 1 is traced with size 2 too, so that fewer meshes are traced.
    """
    rules = program.execution.placement.rules
    params = dict(rules.params)
    # These numbers depend on the size: chunks of tokens, loops over stages, and steps
    # of a ring. Around experts, the axes of their matrices are manual.
    fixed = [params["experts"], params["layers"], *rules.spec("seq")]
    if program.config.model.expert_layers:
        fixed.append(params["mlp"])
    dims = [
        dim
        for leaf in jax.tree.leaves(program.state.params)
        for dim, entry in zip(leaf.shape, leaf.sharding.spec, strict=False)
        if axis in mesh_axes(entry)
    ]
    is_fixed = any(axis in mesh_axes(entry) for entry in fixed)
    is_even = all(dim % 2 == 0 for dim in dims)
    return 2 if is_even and not is_fixed else program.mesh.shape[axis]
