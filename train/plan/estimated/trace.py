"""Trace the real program to jaxprs: the gradients of a microbatch, and the update.

The layouts of a search differ in shapes and share most equations. So gradients are
traced once for each remat policy, on the smallest possible mesh, and
plan/estimated/walk.py inserts the local sizes. Nothing is lowered.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

from data.batch import Batch
from model.axes import mesh_axes
from model.catalog import parts_of
from model.choices import Attention, ContextAttention, Grouped
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import abstract_gpt, params_of
from model.params import ParamInfo, is_info
from model.parts.attention import KernelAttention
from train.core.layout import batch_shards
from train.core.optimizer.update import Optimizer
from train.core.recipe import Recipe
from train.core.step import make_gradients
from train.hardware.interconnect import num_slices_along
from train.resolve.program import ConfiguredProgram

_KERNEL_TILE = 128  # positions in a tile of the traced kernel
_NOT_GATHERED = ("experts", "layers")  # dims along which no parameter is gathered
_ROWS = 2  # traced rows of a device if no equation depends on their number


def trace_gradients(program: ConfiguredProgram) -> ClosedJaxpr:
    """Trace the function (parameters, batch) -> (loss, gradients) of a microbatch."""
    config = program.config
    execution = program.execution
    placement = execution.placement
    mesh = program.mesh
    # The kernels of cuDNN, of norms and of grouped products are not traced. Splash, the
    # operations of a norm, and XLA's own grouped product read, write and save the same
    # arrays.
    attention = execution.attention
    kernel = Attention.splash if attention.kernel.is_cudnn else attention.kernel
    execution = execution._replace(
        attention=KernelAttention(kernel, attention.context),
        grouped=Grouped.ragged,
        normalize=None,
    )
    tile = _KERNEL_TILE if kernel is Attention.splash else 1
    table = [rule for name, rule in placement.rules.params if name not in _NOT_GATHERED]
    axes = {axis for entry in table for axis in mesh_axes(entry)}
    is_dcn_sharded = any(num_slices_along(mesh, [axis]) > 1 for axis in axes)
    sizes = mesh.shape
    # The groups of gathers depend on all sizes if TPU slices shard a parameter.
    if placement.platform != "tpu" or not is_dcn_sharded:
        # Each collective is traced as one step. `phases` splits it for the real mesh.
        placement = replace(placement, axis_steps=())
        sizes = _traced_sizes(program)
    axis_types = (AxisType.Auto,) * len(sizes)
    traced_mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types)
    shards = program.batch_shards
    if shards.sequence > 1 and attention.in_ring_order:
        tile *= 2 * shards.sequence
    length = -(-config.data.sequence_length // tile) * tile
    rows = _ROWS
    if config.model.expert_layers or mesh.shape["pipeline"] > 1:
        # Experts sort the local tokens, and stages split the local rows.
        rows = config.data.batch_size // config.train.accumulation_steps // shards.rows
    rows *= batch_shards(placement.rules, sizes).rows
    array = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return _trace_gradients(
        config.model,
        execution._replace(placement=replace(placement, mesh=traced_mesh)),
        program.recipe._replace(accumulation_steps=1),
        jax.tree.map(lambda _: array, program.batch),
    )


@functools.lru_cache(maxsize=64)
def _trace_gradients(
    config: ModelConfig, execution: Execution, recipe: Recipe, batch: Batch
) -> ClosedJaxpr:
    model = abstract_gpt(config, parts_of(config))
    step = make_gradients(model, execution, recipe)
    return jax.make_jaxpr(step)(params_of(model), batch)


def trace_update(optimizer: Optimizer, params: Any, state: Any) -> ClosedJaxpr:
    """Trace the function (parameters, state, gradients) -> (parameters, state)."""
    # Products do not depend on where moments are, or on whether layers take turns.
    optimizer = replace(optimizer, update_layers=None)
    params, state = jax.tree.map(lambda x: x.update(sharding=None), (params, state))

    def update(params: Any, state: Any, grads: Any) -> Any:
        return optimizer.update(grads, jnp.float32(1), state, params, jnp.int32(0))[:2]

    return jax.make_jaxpr(update)(params, state, params)


def _traced_sizes(program: ConfiguredProgram) -> dict[str, int]:
    """Return the sizes of the mesh axes in the trace.

    They are those of the mesh if smaller ones together do not divide a dim.
    """
    sizes = {axis: _traced_size(axis, program) for axis in program.mesh.shape}
    rules = program.execution.placement.rules

    def is_divided(info: ParamInfo, leaf: jax.ShapeDtypeStruct) -> bool:
        # The sharding of the leaf would leave out axes of size 1.
        pairs = zip(leaf.shape, rules.param_spec(info.axes), strict=False)
        return all(
            dim % math.prod(sizes[axis] for axis in mesh_axes(entry)) == 0
            for dim, entry in pairs
        )

    params = program.state.params
    divided = jax.tree.map(is_divided, program.infos, params, is_leaf=is_info)
    return sizes if all(jax.tree.leaves(divided)) else dict(program.mesh.shape)


def _traced_size(axis: str, program: ConfiguredProgram) -> int:
    """Return the size of a mesh axis in the trace: 2, if the equations are the same.

    An axis of size 1 is traced with size 2 too, so that fewer meshes are traced.
    """
    rules = program.execution.placement.rules
    params = dict(rules.params)
    # These numbers depend on the size: chunks of tokens, loops over stages, and steps
    # of a ring. Around experts, the axes of their matrices are manual.
    mlp = [params["mlp"]] if program.config.model.expert_layers else []
    fixed = [params["experts"], params["layers"], *mlp, *rules.spec("seq")]
    shares_rows = program.batch_shards.sequence > 1
    method = program.execution.attention.context
    if shares_rows and method is ContextAttention.ulysses:
        # The devices that share rows must divide the heads of a device.
        fixed += [*rules.spec("heads"), *rules.spec("kv_heads")]
    dims = [
        dim
        for leaf in jax.tree.leaves(program.state.params)
        for dim, entry in zip(leaf.shape, leaf.sharding.spec, strict=False)
        if axis in mesh_axes(entry)
    ]
    is_fixed = any(axis in mesh_axes(entry) for entry in fixed)
    is_even = all(dim % 2 == 0 for dim in dims)
    return 2 if is_even and not is_fixed else program.mesh.shape[axis]
