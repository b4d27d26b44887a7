"""Grouped products on NVIDIA's GPUs: two Pallas kernels that Triton compiles.

`triton_by_rows` has a program for each block of rows of one expert and each tile of
columns, and `triton_by_experts` one for each expert and tile of its matrix. Rows and
columns beyond the end are masked. Blocks that no expert needs do nothing, and those
after the last expert's rows store zeros.

Shapes: M rows, K contracted, N columns, D inputs, F outputs, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

_ROWS, _COLUMNS, _DEPTH = 128, 128, 32  # the sizes of a tile, not tuned on a GPU
_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def triton_by_rows(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each row by its expert's matrix [K, N], or by [N, K] transposed."""
    M, K = x_MK.shape
    E, N = w.shape[0], w.shape[1 if transposed else 2]
    rest = M - jnp.sum(sizes_E)[None]
    sizes = jnp.concatenate([sizes_E, rest.astype(sizes_E.dtype)])
    blocks = -(-sizes // _ROWS)
    last, ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
    block = jnp.arange(M // _ROWS + E + 1)
    expert = jnp.sum(block[:, None] >= last[None], axis=1)
    own = jnp.minimum(expert, E)
    start = jnp.where(
        expert > E,
        M,
        (ends - sizes)[own] + _ROWS * (block - (last - blocks)[own]),
    )
    run = _make_call(
        partial(_rows_kernel, E=E, K=K, N=N, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((M, N), dtype),
        grid=(block.size, pl.cdiv(N, _COLUMNS)),
        interpret=interpret,
        name="grouped_rows",
    )
    expert, first, end = (x.astype(jnp.int32) for x in (own, start, ends[own]))
    return run(expert, first, end, x_MK, w)


def _rows_kernel(
    expert_ref, start_ref, end_ref, x_ref, w_ref, y_ref, *, E, K, N, transposed
):
    at = pl.program_id(0)
    expert, start, end = expert_ref[at], start_ref[at], end_ref[at]
    column = pl.program_id(1) * _COLUMNS
    rows, columns = pl.ds(start, _ROWS), pl.ds(column, _COLUMNS)
    in_rows = start + jnp.arange(_ROWS)[:, None] < end
    in_columns = column + jnp.arange(_COLUMNS) < N

    def add(step, total):
        depth = pl.ds(step * _DEPTH, _DEPTH)
        in_depth = step * _DEPTH + jnp.arange(_DEPTH) < K
        x = _load(x_ref.at[rows, depth], in_rows & in_depth[None])
        if transposed:
            used_w = in_columns[:, None] & in_depth[None]
            w = _load(w_ref.at[expert, columns, depth], used_w)
        else:
            used_w = in_depth[:, None] & in_columns[None]
            w = _load(w_ref.at[expert, depth, columns], used_w)
        return total + _dot(x, w, 1, 1 if transposed else 0)

    used = (expert < E) & (start < end)
    steps = used.astype(jnp.int32) * pl.cdiv(K, _DEPTH)
    zeros = jnp.zeros((_ROWS, _COLUMNS), jnp.float32)
    y = jax.lax.fori_loop(0, steps, add, zeros)
    mask = in_rows & in_columns[None]
    triton.store(y_ref.at[rows, columns], y.astype(y_ref.dtype), mask=mask)


def triton_by_experts(
    x_MD: jax.Array,
    y_MF: jax.Array,
    sizes_E: jax.Array,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Multiply an expert's rows [M, D], transposed, by its rows [M, F]: [E, D, F]."""
    E, D, F = sizes_E.size, x_MD.shape[1], y_MF.shape[1]
    ends = jnp.cumsum(sizes_E)
    run = _make_call(
        partial(_experts_kernel, D=D, F=F),
        out_shape=jax.ShapeDtypeStruct((E, D, F), dtype),
        grid=(E, pl.cdiv(D, _ROWS), pl.cdiv(F, _COLUMNS)),
        interpret=interpret,
        name="grouped_experts",
    )
    starts_E, ends_E = (x.astype(jnp.int32) for x in (ends - sizes_E, ends))
    return run(starts_E, ends_E, x_MD, y_MF)


def _experts_kernel(start_ref, end_ref, x_ref, y_ref, w_ref, *, D, F):
    expert, row, column = (pl.program_id(i) for i in range(3))
    start, end = start_ref[expert], end_ref[expert]
    inputs, outputs = pl.ds(row * _ROWS, _ROWS), pl.ds(column * _COLUMNS, _COLUMNS)
    in_inputs = row * _ROWS + jnp.arange(_ROWS) < D
    in_outputs = column * _COLUMNS + jnp.arange(_COLUMNS) < F

    def add(step, total):
        first = start + step * _DEPTH
        rows, in_rows = pl.ds(first, _DEPTH), first + jnp.arange(_DEPTH)[:, None] < end
        x = _load(x_ref.at[rows, inputs], in_rows & in_inputs[None])
        y = _load(y_ref.at[rows, outputs], in_rows & in_outputs[None])
        return total + _dot(x, y, 0, 0)

    zeros = jnp.zeros((_ROWS, _COLUMNS), jnp.float32)
    w = jax.lax.fori_loop(0, pl.cdiv(end - start, _DEPTH), add, zeros)
    mask = in_inputs[:, None] & in_outputs[None]
    triton.store(w_ref.at[expert, inputs, outputs], w.astype(w_ref.dtype), mask=mask)


def _load(ref: Any, mask: jax.Array) -> jax.Array:
    return triton.load(ref, mask=mask, other=0.0)


def _dot(a: jax.Array, b: jax.Array, in_a: int, in_b: int) -> jax.Array:
    pairs = (((in_a,), (in_b,)), ((), ()))
    return jax.lax.dot_general(a, b, pairs, preferred_element_type=jnp.float32)


def _make_call(kernel: Callable, **options: Any) -> Callable[..., jax.Array]:
    """Return the call of a kernel that gets its operands as whole arrays."""

    def call(*operands: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            in_specs=[_WHOLE] * len(operands),
            out_specs=_WHOLE,
            compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
            **options,
        )(*operands)

    return call
