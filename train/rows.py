"""The program of one device: its part of the batch, and what it tells the others.

Along the mesh axes that cut the batch's rows (data, fsdp) or positions (context)
nothing is left to XLA's partitioner: what is gathered and reduced, and when, stands in
the program, and is the same at any number of devices. Of a parameter W[D_fsdp,
F_tensor] the program sees the part W[D/fsdp, F]; what `tensor` cuts, XLA takes care of.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.attention.ring import in_ring_order
from model.axes import AxisRules, mesh_axes, wide
from model.choices import ContextAttention
from model.execution import Execution
from model.gather import on_shards
from model.params import Kind, ParamInfo, is_info
from model.taps import Noted

REPLICATED = PartitionSpec()


def by_rows(
    function: Callable[[Execution, Any, Any], Any],
    how: Execution,
    infos: Any,
    results: Callable[[Any], Any],
) -> Callable[[Any, Any], Any]:
    """Run `function(how, params, batch)` on each device's own part of the batch.

    Where devices that share a row attend in a ring, its positions are brought into the
    ring's order first: all but attention is the same in any order. Vectors come whole,
    they are small, but only those of a device's own layers; of matrices and tables each
    device has its part.

    Args:
        function: of a device; its `how` says which axes are by hand.
        how: of the whole program.
        infos: tree of `ParamInfo`.
        results: from the parameters' PartitionSpecs to those of the results.
    """

    def run(params: Any, batch: Any) -> Any:
        sizes = jax.sharding.get_abstract_mesh().shape
        rules = rules_by_hand(how.rules, sizes)
        if not rules.by_hand:
            return function(how, params, batch)
        specs = jax.tree.map(
            lambda info: PartitionSpec(*_by_hand(info, rules)), infos, is_leaf=is_info
        )
        own = how._replace(rules=rules)
        in_ring = how.context_attention is ContextAttention.ring and rules.sequence

        def on_device(params: Any, batch: Any) -> Any:
            if in_ring:
                batch = jax.tree.map(lambda x: in_ring_order(x, rules.sequence), batch)
            return function(own, params, batch)

        return jax.shard_map(
            on_device,
            in_specs=(specs, how.rules.spec("batch", "seq")),
            out_specs=results(specs),
            axis_names={*rules.by_hand},
            check_vma=False,
        )(params, batch)

    return run


def rules_by_hand(rules: AxisRules, sizes: dict[str, int]) -> AxisRules:
    """Return the rules of a device's program on a mesh.

    By hand are the axes that cut the batch, and with them those of one device; none
    are, if the batch is whole everywhere.
    """
    batch = rules.spec("batch", "seq") if rules.activations else ()
    cut = [[a for a in mesh_axes(entry) if sizes.get(a, 1) > 1] for entry in batch]
    if not any(cut):
        return rules
    rows, sequence = cut
    wide = [axis for axis, size in sizes.items() if size > 1]
    left = [axis for axis in wide if axis not in (*rows, *sequence)]
    return replace(
        rules,
        activations=rules.activations if left else (),
        by_hand=tuple(axis for axis in sizes if axis not in left),
        sequence=tuple(sequence),
    )


def over_rows(sums: Any, how: Execution) -> Any:
    """Add up what each device has of its own part of the batch."""
    parts = wide(how.rules.by_hand)
    return jax.tree.map(lambda x: jax.lax.psum(x, parts), sums)


def of_all_rows(noted: Noted, how: Execution) -> Noted:
    """Reduce figures that each device has of its own part of the batch."""
    parts = wide(how.rules.by_hand)
    return noted.reduced(
        lambda largest: jax.lax.pmax(largest, parts),
        lambda share: jax.lax.pmean(share, parts),
    )


def over_copies(grads: Any, infos: Any, how: Execution) -> Any:
    """Add up the gradients of the copies of each part, in the reduce dtype.

    Those of matrices are left out, where `how` says that the layers do it.
    """

    def add(info: ParamInfo, grad: jax.Array) -> jax.Array:
        if info.kind is Kind.vector:
            copies = how.rules.copies(info.axes[: info.stacked])
            return jax.lax.psum(grad.astype(jnp.float32), copies)
        copies = how.rules.copies(info.axes)
        if not copies or (info.kind is Kind.matrix and how.reduces_copies):
            return grad
        place = how.rules.param_spec(info.axes)
        add_up = on_shards(partial(jax.lax.psum, axis_name=copies), place)
        return add_up(grad.astype(how.reduce_dtype)).astype(grad.dtype)

    with jax.named_scope("copies"):
        return jax.tree.map(add, infos, grads, is_leaf=is_info)


def _by_hand(info: ParamInfo, rules: AxisRules) -> list:
    """Return a parameter's PartitionSpec over the axes by hand."""
    named = info.axes[: info.stacked] if info.kind is Kind.vector else info.axes
    spec = dict(rules.params)
    dims = [mesh_axes(spec[axis]) for axis in named]
    return [tuple(a for a in axes if a in rules.by_hand) or None for axes in dims]


def split(rows: Any, parts: int) -> Any:
    """Cut arrays [B, ...] into microbatches [parts, B/parts, ...].

    Each microbatch is spread over all devices.
    Every parts-th row goes to the same microbatch, so that no row changes its device.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1),
        rows,
    )


def sum_over_microbatches(
    value_and_grad: Callable[..., Any],
    params: Any,
    parts: Any,
    load_shape: tuple[int, int] | None,
) -> tuple[Any, tuple[jax.Array, jax.Array | None, Noted | None]]:
    """Sum float32 gradients, losses and loads over microbatches, by one scan.

    Args:
        value_and_grad: (params, rows) -> (gradients, (loss, load, figures of layers)).
        params: tree of parameters.
        parts: rows of each microbatch, along a leading dim.
        load_shape: of the experts' load, [layers, experts]; None without experts.

    Returns:
        As `value_and_grad`; of the layers' figures the largest values and mean shares.
    """

    def add(total, part: Any):
        grads, (loss, load, noted) = value_and_grad(params, part)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(jnp.add, total, ((loss, load), grads)), noted

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    no_load = None if load_shape is None else jnp.zeros(load_shape, jnp.float32)
    start = (jnp.zeros((), jnp.float32), no_load), zeros
    with jax.named_scope("microbatches"):
        ((loss, load), grads), noted = jax.lax.scan(add, start, parts)
    if noted is not None:
        mean = partial(jnp.mean, axis=0)
        noted = noted.reduced(partial(jnp.max, axis=0), mean)
    return grads, (loss, load, noted)
