"""The per-device program: local rows and explicit collectives, under `shard_map`.

XLA's partitioner does not handle the mesh axes that shard the batch's rows (data, fsdp)
or positions (context). For them the program states what is gathered and reduced, and
when, in the same way for any number of devices. Of a parameter W[D_fsdp, F_tensor], the
program sees W[D/fsdp, F], because XLA's partitioner handles `tensor`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.axes import mesh_axes
from model.execution import Execution
from model.gather import on_shards
from model.params import Kind, ParamInfo, is_info
from model.placement import Placement
from model.taps import LayerFigures

REPLICATED = PartitionSpec()


def run_per_device(
    function: Callable[..., Any],
    execution: Execution,
    infos: Any,
    result_specs: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return a function that runs `function(params, batch, *scalars)` on each device.

    If devices that share a row attend in a ring, the row's positions are first permuted
    into ring order; only attention depends on the order. `function` gets matrices and
    embedding tables sharded, and vectors replicated except along their `layers` dim.
    `result_specs` maps the PartitionSpecs of parameters to those of results.
    """
    placement = execution.placement
    if not placement.manual_axes:
        return function
    specs = jax.tree.map(
        lambda info: _manual_spec(info, placement), infos, is_leaf=is_info
    )
    arrange = execution.attention.arrange
    sequence_axes = placement.sequence_axes

    def on_device(params: Any, batch: Any, *scalars: jax.Array) -> Any:
        if sequence_axes:
            batch = jax.tree.map(lambda x: arrange(x, sequence_axes), batch)
        return function(params, batch, *scalars)

    def run(params: Any, batch: Any, *scalars: jax.Array) -> Any:
        batch_spec = placement.rules.spec("batch", "seq")
        return jax.shard_map(
            on_device,
            mesh=placement.mesh,
            in_specs=(specs, batch_spec, *[REPLICATED] * len(scalars)),
            out_specs=result_specs(specs),
            axis_names=placement.manual_axes,
            check_vma=False,
        )(params, batch, *scalars)

    return run


def sum_over_rows(sums: Any, placement: Placement) -> Any:
    """Sum values of local rows over all devices that share the batch."""
    return jax.tree.map(lambda x: jax.lax.psum(x, placement.batch_axes), sums)


def reduce_over_rows(figures: LayerFigures, placement: Placement) -> LayerFigures:
    """Reduce the layer figures of local rows over all devices that share the batch."""
    return figures.reduce(
        lambda largest: jax.lax.pmax(largest, placement.batch_axes),
        lambda share: jax.lax.pmean(share, placement.batch_axes),
    )


def reduce_over_replicas(grads: Any, infos: Any, execution: Execution) -> Any:
    """Sum the gradients of replicated parameters over replicas, in the reduce dtype.

    Gradients of matrices are unchanged if the layers sum them (`reduce_in_layers`).
    """
    placement = execution.placement

    def reduce(info: ParamInfo, grad: jax.Array) -> jax.Array:
        if info.kind is Kind.vector:
            axes = placement.replica_axes(info.axes[: info.stacked])
            return jax.lax.psum(grad.astype(jnp.float32), axes)
        axes = placement.replica_axes(info.axes)
        summed_in_layer = info.kind is Kind.matrix and placement.reduce_in_layers
        if not axes or summed_in_layer:
            return grad
        all_reduce = on_shards(
            partial(jax.lax.psum, axis_name=axes), placement.param_spec(info.axes)
        )
        reduce_dtype = execution.numerics.reduce_dtype
        return all_reduce(grad.astype(reduce_dtype)).astype(grad.dtype)

    with jax.named_scope("copies"):
        return jax.tree.map(reduce, infos, grads, is_leaf=is_info)


def _manual_spec(info: ParamInfo, placement: Placement) -> PartitionSpec:
    """Return a parameter's PartitionSpec over the manual axes."""
    axes = info.axes[: info.stacked] if info.kind is Kind.vector else info.axes
    dims = map(mesh_axes, placement.rules.param_spec(axes))
    manual = [tuple(a for a in dim if a in placement.manual_axes) for dim in dims]
    return PartitionSpec(*(dim or None for dim in manual))


def split(rows: Any, count: int) -> Any:
    """Split arrays [B, ...] into microbatches [count, B / count, ...].

    Microbatch i has the rows i, i + count, i + 2 count, ..., so that no row changes its
    device and each device has the same number of rows of each microbatch.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1),
        rows,
    )


def sum_over_microbatches(
    value_and_grad: Callable[..., Any],
    params: Any,
    microbatches: Any,
    num_losses: int,
    load_shape: tuple[int, int] | None,
) -> tuple[Any, tuple[tuple[jax.Array, ...], jax.Array | None, LayerFigures | None]]:
    """Sum gradients (in float32), losses and loads over microbatches in one scan.

    Args:
        value_and_grad: (params, rows) -> (gradients, (losses, load, figures)), where
            figures are those of layers.
        params: tree of parameters.
        microbatches: the rows of all microbatches, stacked.
        num_losses: the number of losses.
        load_shape: the shape [layers, experts] of the load. None without experts.

    Returns:
        The sums, in the form that `value_and_grad` returns. Figures of layers are not
        sums: largest values are maxima over microbatches, and shares are means.
    """

    def add(total, rows: Any):
        grads, (losses, load, figures) = value_and_grad(params, rows)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(jnp.add, total, ((losses, load), grads)), figures

    zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zero_load = None if load_shape is None else jnp.zeros(load_shape, jnp.float32)
    zero_losses = (jnp.zeros((), jnp.float32),) * num_losses
    zeros = (zero_losses, zero_load), zero_grads
    with jax.named_scope("microbatches"):
        ((losses, load), grads), figures = jax.lax.scan(add, zeros, microbatches)
    if figures is not None:
        mean = partial(jnp.mean, axis=0)
        figures = figures.reduce(partial(jnp.max, axis=0), mean)
    return grads, (losses, load, figures)
