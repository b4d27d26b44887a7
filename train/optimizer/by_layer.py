"""An update layer by layer, of moments that lie in host memory, or in eight bits.

Arrays W[L, ...] are updated in a loop over their layers: a layer's moments come to the
device, and go back once they are updated, so that those of two layers at most are
there, and in float32. Tables move whole. Moments of vectors stay on the device: they
are few, and XLA:TPU cannot take one layer's from a host's [L, D] of eight bits (libtpu
0.0.50). The result is that of one update of everything, bit by bit: of other parameters
an update needs the norm of all gradients, no more.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from optax import MaskedNode

from model.params import STACKED
from train.optimizer.moments import is_eight_bits

# (gradients, moments, parameters, first layer) -> (parameters, moments, whether the
# update is accepted), of some of the parameters.
Update = Callable[[Any, Any, Any, Any], tuple[Any, Any, jax.Array]]


def layer_by_layer(
    update: Update, grads: Any, moments: Any, params: Any, on_host: bool, in_place: bool
) -> tuple[Any, Any, jax.Array]:
    """Return parameters and moments after an update, and whether it was accepted.

    Args:
        update: of trees in which some leaves are left out (`optax.MaskedNode`).
        grads: tree of arrays.
        moments: of an optax transformation.
        params: tree of arrays.
        on_host: whether moments lie in host memory, but for vectors' and counts.
        in_place: whether new moments take the old ones' place in each iteration; else
            they are stacked anew, and the host holds both until the loop's end.
    """
    home = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    parts, accepted = [], jnp.bool_(True)
    for stack in (None, *STACKED):
        layer_grads, layer_moments, layer_params = (
            _only(stack, tree) for tree in (grads, moments, params)
        )
        if stack is None:
            layer_params, layer_moments, fine = update(
                layer_grads, _to_device(layer_moments, 2), layer_params, 0
            )
            parts.append((layer_params, _moved(layer_moments, 2, home)))
        elif jax.tree.leaves(layer_grads):
            *part, fine = _in_loop(
                update,
                layer_grads,
                moments=layer_moments,
                params=layer_params,
                home=home,
                in_place=in_place,
            )
            parts.append((*part,))
        else:
            continue
        accepted &= fine
    return *jax.tree.map(_given, *parts, is_leaf=_is_whole), accepted


def _in_loop(
    update: Update, grads: Any, moments: Any, params: Any, home: Any, in_place: bool
) -> tuple[Any, Any, jax.Array]:
    """Update stacked layers one by one."""
    depth = len(jax.tree.leaves(params)[0])

    def iterate(carry: tuple[Any, Any], i: jax.Array):
        params, kept = carry
        own = _to_device(_at(kept if in_place else moments, i), 3)
        new_params, new, fine = update(_at(grads, i), own, _at(params, i), i)
        params = _put(params, new_params, i)
        if in_place:
            return (params, _put(kept, _moved(new, 3, home), i)), ((), fine)
        new = jax.tree.map(lambda x: x[0] if x.ndim else x, new)
        return (params, ()), (_moved(new, 2, home), fine)

    start = params, moments if in_place else ()
    (params, kept), (stacked, fine) = jax.lax.scan(iterate, start, jnp.arange(depth))
    return params, kept if in_place else stacked, jnp.all(fine)


def _only(stack: str | None, tree: Any) -> Any:
    """Leave out of a tree all but scalars and the leaves of one stack of layers."""

    def kept(path: tuple[Any, ...], leaf: Any) -> Any:
        names = (getattr(key, "key", None) for key in path)
        own = next((name for name in names if name in STACKED), None)
        is_count = getattr(leaf, "ndim", None) == 0
        return leaf if own == stack or is_count else MaskedNode()

    return jax.tree_util.tree_map_with_path(kept, tree, is_leaf=is_eight_bits)


def _given(*parts: Any) -> Any:
    """Return a leaf of the part that has it; a scalar is the same in all."""
    return next(part for part in parts if not _is_left_out(part))


def _is_left_out(leaf: object) -> bool:
    return isinstance(leaf, MaskedNode)


def _is_whole(leaf: object) -> bool:
    return _is_left_out(leaf) or is_eight_bits(leaf)


def _to_device(tree: Any, dims: int) -> Any:
    return _moved(tree, dims, jax.memory.Space.Device)


def _moved(tree: Any, dims: int, space: Any) -> Any:
    """Move arrays of so many dims at least."""
    return jax.tree.map(
        lambda x: jax.device_put(x, space) if x.ndim >= dims else x, tree
    )


def _at(tree: Any, i: jax.Array) -> Any:
    """Return one layer's part [1, ...] of stacked leaves."""
    index = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda x: index(x, i) if x.ndim else x, tree)


def _put(tree: Any, layer: Any, i: jax.Array) -> Any:
    """Return stacked leaves with another layer's part."""
    update = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(
        lambda x, part: update(x, part, i, 0) if x.ndim else x, tree, layer
    )
