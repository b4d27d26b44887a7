"""Update one layer at a time, for moments in host memory or in eight bits.

Arrays W[L, ...] are updated in a loop over their layers. The moments of a layer are
copied to the device, updated and copied back. So the device holds the moments of at
most two layers, and converts only these to float32. The moments of a table are copied
as a whole. Moments of vectors stay on the device, because they are small, and XLA:TPU
cannot read one layer of an eight-bit [L, D] in host memory (libtpu 0.0.50).

The result is bitwise equal to one update of all parameters, because the update of a
parameter depends on other parameters only through the norm of all gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
from optax import MaskedNode

from model.params import LAYERS
from train.core.optimizer.moments import is_eight_bits
from train.core.optimizer.update import UpdatePart


def update_layer_by_layer(
    update: UpdatePart,
    grads: Any,
    moments: Any,
    params: Any,
    on_host: bool,
    in_place: bool,
) -> tuple[Any, Any, jax.Array]:
    """Return the updated parameters and moments, and whether the update was accepted.

    Args:
        update: updates trees in which some leaves are left out (`optax.MaskedNode`).
        grads: tree of arrays.
        moments: the state of an optax transformation.
        params: tree of arrays.
        on_host: whether moments of matrices and tables are in host memory.
        in_place: whether each iteration writes new moments over the previous ones.
            Otherwise the loop stacks new moments, and the host holds old and new ones.
    """
    space = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    updated_parts = []
    accepted = jnp.bool_(True)
    segments = params[LAYERS].items()
    stacks = [(segment, slot) for segment, slots in segments for slot in slots]
    for stack in (None, *stacks):
        part_grads, part_moments, part_params = (
            _select_stack(stack, tree) for tree in (grads, moments, params)
        )
        if stack is None:
            part_params, part_moments, part_accepted = update(
                part_grads, _to_device(part_moments, 2), part_params, 0
            )
            part_moments = _move(part_moments, 2, space)
        else:
            part_params, part_moments, part_accepted = _update_stack(
                update,
                part_grads,
                part_moments,
                part_params,
                space=space,
                in_place=in_place,
            )
        updated_parts.append((part_params, part_moments))
        accepted &= part_accepted
    params, moments = jax.tree.map(_first_unmasked, *updated_parts, is_leaf=_is_leaf)
    return params, moments, accepted


def _update_stack(
    update: UpdatePart,
    grads: Any,
    moments: Any,
    params: Any,
    *,
    space: Any,
    in_place: bool,
) -> tuple[Any, Any, jax.Array]:
    """Return the results of `update` for stacked layers, updated one by one."""
    depth = len(jax.tree.leaves(params)[0])

    def iterate(carry: tuple[Any, Any], i: jax.Array):
        params, carried = carry
        layer_moments = _to_device(_slice_layer(carried if in_place else moments, i), 3)
        new_params, new_moments, accepted = update(
            _slice_layer(grads, i), layer_moments, _slice_layer(params, i), i
        )
        params = _replace_layer(params, new_params, i)
        if in_place:
            carried = _replace_layer(carried, _move(new_moments, 3, space), i)
            return (params, carried), ((), accepted)
        new_moments = jax.tree.map(lambda x: x[0] if x.ndim else x, new_moments)
        return (params, ()), (_move(new_moments, 2, space), accepted)

    carry = params, moments if in_place else ()
    (params, carried), (stacked_moments, accepted) = jax.lax.scan(
        iterate, carry, jnp.arange(depth)
    )
    return params, carried if in_place else stacked_moments, jnp.all(accepted)


def _select_stack(stack: tuple[str, str] | None, tree: Any) -> Any:
    """Return a tree with only scalars and the leaves of one stack.

    `stack` is a segment and a slot. None selects the leaves that are not of layers.
    """

    def select(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [getattr(key, "key", None) for key in path]
        leaf_stack = None
        if LAYERS in names:
            start = names.index(LAYERS) + 1
            leaf_stack = tuple(names[start : start + 2])
        is_scalar = getattr(leaf, "ndim", None) == 0
        return leaf if leaf_stack == stack or is_scalar else MaskedNode()

    return jax.tree_util.tree_map_with_path(select, tree, is_leaf=is_eight_bits)


def _first_unmasked(*leaves: Any) -> Any:
    """Return the first unmasked leaf. Scalars are unmasked and equal in all parts."""
    return next(leaf for leaf in leaves if not isinstance(leaf, MaskedNode))


def _is_leaf(leaf: object) -> bool:
    return isinstance(leaf, MaskedNode) or is_eight_bits(leaf)


def _to_device(tree: Any, min_dims: int) -> Any:
    return _move(tree, min_dims, jax.memory.Space.Device)


def _move(tree: Any, min_dims: int, space: Any) -> Any:
    """Move the arrays that have at least `min_dims` dims to a memory space."""
    return jax.tree.map(
        lambda x: jax.device_put(x, space) if x.ndim >= min_dims else x, tree
    )


def _slice_layer(tree: Any, i: jax.Array) -> Any:
    """Return layer i [1, ...] of stacked leaves."""
    index = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda x: index(x, i) if x.ndim else x, tree)


def _replace_layer(tree: Any, layer: Any, i: jax.Array) -> Any:
    """Return stacked leaves in which layer i is replaced."""
    update = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(
        lambda x, new: update(x, new, i, 0) if x.ndim else x, tree, layer
    )
