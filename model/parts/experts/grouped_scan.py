"""Grouped products by loops over experts and blocks of their rows, on any platform.

The loops are made for XLA:CPU. Each block is a plain product of a slice of rows, and
the number of blocks depends on the sizes at run time. An expert's rows run in large
blocks first and in small blocks last, so that most blocks are fast and few rows are
wasted (docs/log).

Shapes: M rows, K contracted, N columns, D inputs, F outputs, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_BLOCK_SIZES = (512, 128, 32)  # rows


def multiply_rows(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply each row by its expert's matrix [K, N], or by [N, K] transposed."""

    def run_expert(e: jax.Array, y_MN: jax.Array) -> jax.Array:
        def run_block(start: jax.Array, size: int, mask: jax.Array, y_MN: jax.Array):
            product = _dot(_rows(x_MK, start, size), w_e, 1, 1 if transposed else 0)
            y = jnp.where(mask, product.astype(dtype), _rows(y_MN, start, size))
            return jax.lax.dynamic_update_slice(y_MN, y, (start, 0))

        w_e = jax.lax.dynamic_index_in_dim(w, e, keepdims=False)
        return _run_blocks(x_MK.shape[0], sizes_E, e, run_block, y_MN)

    N = w.shape[1 if transposed else 2]
    y_MN = jnp.zeros((x_MK.shape[0], N), dtype)
    return jax.lax.fori_loop(0, sizes_E.size, run_expert, y_MN)


def multiply_by_expert(
    x_MD: jax.Array, y_MF: jax.Array, sizes_E: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return x^T y [E, D, F] over the rows of each expert in x [M, D], y [M, F]."""

    def run_expert(_, e: jax.Array):
        def run_block(start: jax.Array, size: int, mask: jax.Array, total: jax.Array):
            x = jnp.where(mask, _rows(x_MD, start, size), 0)
            return total + _dot(x, _rows(y_MF, start, size), 0, 0)

        zeros = jnp.zeros((x_MD.shape[1], y_MF.shape[1]), jnp.float32)
        w_e = _run_blocks(x_MD.shape[0], sizes_E, e, run_block, zeros)
        return None, w_e.astype(dtype)

    return jax.lax.scan(run_expert, None, jnp.arange(sizes_E.size))[1]


def _run_blocks(
    M: int, sizes_E: jax.Array, e: jax.Array, run_block: Callable, carry: Any
) -> Any:
    """Run `run_block` over the rows of expert e, out of M rows.

    `run_block` is (first row, size, mask [size, 1] of rows to use, carry) -> carry.
    """
    expert_start = jnp.sum(jnp.where(jnp.arange(sizes_E.size) < e, sizes_E, 0))
    end = expert_start + sizes_E[e]

    def run_next(size: int, state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, carry = state
        block_start = jnp.minimum(start, M - size)
        rows = block_start + jnp.arange(size)
        mask = (rows >= start) & (rows < end)
        return start + size, run_block(block_start, size, mask[:, None], carry)

    state = expert_start, carry
    # Each size has its own loop. In one loop over blocks of all sizes, the `switch`
    # between sizes would make XLA:CPU copy the carry.
    *large_sizes, smallest = [size for size in _BLOCK_SIZES if size <= M] or [M]
    for size in large_sizes:
        has_block = partial(lambda size, state: end - state[0] >= size, size)
        state = jax.lax.while_loop(has_block, partial(run_next, size), state)
    run_smallest = partial(run_next, smallest)
    return jax.lax.while_loop(lambda state: state[0] < end, run_smallest, state)[1]


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start, 0), (size, x.shape[1]))


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    dim_numbers = (((dim_a,), (dim_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dim_numbers, preferred_element_type=jnp.float32)
