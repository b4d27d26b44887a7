"""The real program as jaxprs: the gradients of a microbatch, and the update.

Shapes differ between the layouts of a search, the equations do not: gradients are
traced once for each policy of recomputation, on a mesh as small as one can be, and
plan/estimated/walk.py puts in the sizes that devices see. Nothing is lowered.
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
from model.choices import Attention, ContextAttention, Grouped
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import abstract_gpt, params_of
from train.config import Remat, TrainConfig
from train.hardware.interconnect import num_parts
from train.optimizer.update import Optimizer
from train.program import Program, batch_shards
from train.step import make_gradients

_KERNEL_TILE = 128  # the kernel that is traced works on as many positions
_ROWS = 2  # of a device, where no equation depends on their number


def trace_gradients(program: Program) -> ClosedJaxpr:
    """Trace (parameters, batch) -> (loss, gradients) of one microbatch."""
    config, execution = program.config, program.execution
    placement = execution.placement
    if execution.attention.is_cudnn:
        # cuDNN's kernel cannot be traced without cuDNN. Splash reads, writes and keeps
        # the same arrays.
        execution = execution._replace(attention=Attention.splash)
    # XLA's own product for what is grouped: it reads and writes what the kernels do.
    execution = execution._replace(grouped=Grouped.ragged)
    tile = _KERNEL_TILE if execution.attention is Attention.splash else 1
    sizes, far = program.mesh.shape, _cut_across_slices(program)
    if not far:  # The steps are those of the whole mesh; phases.py counts them.
        placement = replace(placement, axis_steps=())
    least = {axis: n if far else _least(axis, program) for axis, n in sizes.items()}
    axis_types = (AxisType.Auto,) * len(least)
    mesh = AbstractMesh(tuple(least.values()), tuple(least), axis_types)
    placement = replace(placement, mesh=mesh)
    sharing = program.batch_shards.sequence
    if sharing > 1 and execution.context_attention is ContextAttention.ring:
        tile *= 2 * sharing
    return _gradients(
        config.model,
        execution._replace(placement=placement),
        # The execution has the policy; one microbatch is traced whatever their number.
        replace(config.train, accumulation_steps=1, remat=Remat.none, num_steps=1),
        length=-(-config.data.sequence_length // tile) * tile,
        documents=program.batch.segment_ids is not None,
        rows=_rows(program),
    )


@functools.lru_cache(maxsize=64)
def _gradients(
    config: ModelConfig,
    execution: Execution,
    train: TrainConfig,
    length: int,
    documents: bool,
    rows: int,
) -> ClosedJaxpr:
    model = abstract_gpt(config)
    placement = execution.placement
    assert placement.mesh is not None
    shards = batch_shards(placement.rules, placement.mesh.shape).rows
    field = jax.ShapeDtypeStruct((rows * shards, length), jnp.int32)
    batch = Batch(field, field, field if documents else None, field)
    step = make_gradients(model, execution, train)
    return jax.make_jaxpr(step)(params_of(model), batch)


def trace_update(optimizer: Optimizer, params: Any, state: Any) -> ClosedJaxpr:
    """Trace (gradients, optimizer's state, parameters) -> (parameters, state)."""
    leaves, tree = jax.tree.flatten((params, state))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _update(optimizer, shapes, tree)


@functools.lru_cache(maxsize=64)
def _update(optimizer: Optimizer, shapes: tuple, tree: Any) -> ClosedJaxpr:
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    params, state = jax.tree.unflatten(tree, leaves)
    # Wherever its moments lie it computes the same.
    on_device = replace(optimizer, config=replace(optimizer.config, offload=False))

    def update(grads: Any, state: Any, params: Any) -> Any:
        at = jnp.float32(1), state, params, jnp.int32(0)
        return on_device.update(grads, *at)[:2]

    return jax.make_jaxpr(update)(params, state, params)


def _rows(program: Program) -> int:
    """Return how many rows of a device are traced: all, if equations depend on them.

    Experts sort a device's tokens, stages cut its rows in microbatches.
    """
    if not program.config.model.expert_layers and program.mesh.shape["pipeline"] == 1:
        return _ROWS
    shards = program.batch_shards.rows
    data, train = program.config.data, program.config.train
    return data.batch_size // (shards * train.accumulation_steps)


def _cut_across_slices(program: Program) -> bool:
    """Return whether TPUs of several slices hold a part each of a parameter's dim.

    On all sizes then depends which of them gather and scatter it together.
    """
    params = dict(program.execution.placement.rules.params)
    across = {*mesh_axes(params["experts"]), *mesh_axes(params["layers"])}
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(program.state.params)]
    cut = {axis for spec in specs for entry in spec for axis in mesh_axes(entry)}
    return program.execution.placement.platform == "tpu" and any(
        num_parts(program.mesh, [axis]) > 1 for axis in cut - across
    )


def _least(axis: str, program: Program) -> int:
    """Return the least size of a mesh axis at which the equations are the same.

    An axis of one device is traced as two, so that fewer meshes are traced, where it
    cuts the batch's rows or parameters, and these can be halved.
    """
    size = program.mesh.shape[axis]
    rules = program.execution.placement.rules
    params = dict(rules.params)
    if axis in (*mesh_axes(params["experts"]), *mesh_axes(params["layers"])):
        return size  # on it depends in how many chunks tokens go, or in which loops
    if program.config.model.expert_layers and axis in mesh_axes(params["mlp"]):
        return size  # it is manual around experts, so shapes in there depend on it
    rows, sequence = map(mesh_axes, rules.spec("batch", "seq"))
    if axis in sequence:
        return size  # on it depends how often keys are sent on
    if size > 1:
        return next((n for n in range(2, size) if size % n == 0), size)
    cut = [
        dim
        for leaf in jax.tree.leaves(program.state.params)
        for dim, entry in zip(leaf.shape, leaf.sharding.spec, strict=False)
        if axis in mesh_axes(entry)
    ]
    return 2 if (cut or axis in rows) and all(dim % 2 == 0 for dim in cut) else 1
