"""Grouped products by loops over experts and blocks of their rows, on any platform.

Made for XLA's CPU: a block is a plain product of a slice of rows, and as many blocks
run as the sizes ask for. Those of an expert's rows are large first and small at last,
so that most are fast and few rows are multiplied in vain (docs/log).

Shapes: M rows, K contracted, N columns, D inputs, F outputs, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_BLOCKS = (512, 128, 32)  # rows


def by_rows(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply each row by its expert's matrix [K, N], or by [N, K] transposed."""

    def expert(e: jax.Array, y_MN: jax.Array) -> jax.Array:
        def block(at: jax.Array, size: int, own: jax.Array, y_MN: jax.Array):
            new = _dot(_rows(x_MK, at, size), w_e, 1, 1 if transposed else 0)
            kept = jnp.where(own, new.astype(dtype), _rows(y_MN, at, size))
            return jax.lax.dynamic_update_slice(y_MN, kept, (at, 0))

        w_e = jax.lax.dynamic_index_in_dim(w, e, keepdims=False)
        return _blocks(x_MK.shape[0], sizes_E, e, block, y_MN)

    N = w.shape[1 if transposed else 2]
    y_MN = jnp.zeros((x_MK.shape[0], N), dtype)
    return jax.lax.fori_loop(0, sizes_E.size, expert, y_MN)


def by_experts(
    x_MD: jax.Array, y_MF: jax.Array, sizes_E: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Multiply an expert's rows [M, D], transposed, by its rows [M, F]: [E, D, F]."""

    def expert(_, e: jax.Array):
        def block(at: jax.Array, size: int, own: jax.Array, total: jax.Array):
            x = jnp.where(own, _rows(x_MD, at, size), 0)
            return total + _dot(x, _rows(y_MF, at, size), 0, 0)

        zeros = jnp.zeros((x_MD.shape[1], y_MF.shape[1]), jnp.float32)
        return None, _blocks(x_MD.shape[0], sizes_E, e, block, zeros).astype(dtype)

    return jax.lax.scan(expert, None, jnp.arange(sizes_E.size))[1]


def _blocks(
    M: int, sizes_E: jax.Array, e: jax.Array, block: Callable, carry: Any
) -> Any:
    """Run over the rows of expert e, out of M rows, in blocks.

    `block` is (first row, size, which of its rows [size, 1] are left, carry) -> carry.
    """
    first = jnp.sum(jnp.where(jnp.arange(sizes_E.size) < e, sizes_E, 0))
    end = first + sizes_E[e]

    def run(size: int, state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, carry = state
        at = jnp.minimum(start, M - size)
        rows = at + jnp.arange(size)
        own = (rows >= start) & (rows < end)
        return start + size, block(at, size, own[:, None], carry)

    state = first, carry
    # One loop with a `switch` between sizes would make XLA:CPU copy the carry.
    *large, least = [size for size in _BLOCKS if size <= M] or [M]
    for size in large:
        more = partial(lambda size, state: end - state[0] >= size, size)
        state = jax.lax.while_loop(more, partial(run, size), state)
    return jax.lax.while_loop(lambda s: s[0] < end, partial(run, least), state)[1]


def _rows(x: jax.Array, at: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (at, 0), (size, x.shape[1]))


def _dot(a: jax.Array, b: jax.Array, in_a: int, in_b: int) -> jax.Array:
    pairs = (((in_a,), (in_b,)), ((), ()))
    return jax.lax.dot_general(a, b, pairs, preferred_element_type=jnp.float32)
