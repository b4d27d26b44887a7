"""Grouped products on NVIDIA's GPUs: two Pallas kernels that Triton compiles.

`triton_by_rows` has a program for each block of rows of one expert and each tile of
columns. `triton_by_experts` has a program for each expert and each tile of its matrix.
Rows and columns beyond the end are masked. Blocks of unused rows, which follow the last
expert's rows, store zeros. The grid has the largest possible number of blocks. Blocks
that the sizes do not need do nothing.

Shapes: M rows, K contracted, N columns, D inputs, F outputs, E experts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

# Tile sizes, which are not tuned on a GPU.
ROWS = 128
COLUMNS = 128
_DEPTH = 32
_WHOLE_ARRAY = pl.BlockSpec(memory_space=pl.ANY)
_COMPILER_PARAMS = triton.CompilerParams(num_warps=8, num_stages=3)


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
    E = w.shape[0]
    N = w.shape[1 if transposed else 2]
    unused = M - jnp.sum(sizes_E)[None]
    sizes = jnp.concatenate([sizes_E, unused.astype(sizes_E.dtype)])
    blocks = -(-sizes // ROWS)
    block_ends = jnp.cumsum(blocks)
    ends = jnp.cumsum(sizes)
    block = jnp.arange(M // ROWS + E + 1)
    expert = jnp.sum(block[:, None] >= block_ends[None], axis=1)
    group = jnp.minimum(expert, E)  # Group E is the unused rows.
    start = jnp.where(
        expert > E,
        M,
        (ends - sizes)[group] + ROWS * (block - (block_ends - blocks)[group]),
    )
    group, start, end = (x.astype(jnp.int32) for x in (group, start, ends[group]))
    call = pl.pallas_call(
        partial(_rows_kernel, E=E, K=K, N=N, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((M, N), dtype),
        grid=(block.size, pl.cdiv(N, COLUMNS)),
        in_specs=[_WHOLE_ARRAY] * 5,
        out_specs=_WHOLE_ARRAY,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="grouped_rows",
    )
    return call(group, start, end, x_MK, w)


def _rows_kernel(
    expert_ref, start_ref, end_ref, x_ref, w_ref, y_ref, *, E, K, N, transposed
):
    block = pl.program_id(0)
    expert = expert_ref[block]
    start = start_ref[block]
    end = end_ref[block]
    column = pl.program_id(1) * COLUMNS
    rows = pl.ds(start, ROWS)
    columns = pl.ds(column, COLUMNS)
    in_rows = start + jnp.arange(ROWS)[:, None] < end
    in_columns = column + jnp.arange(COLUMNS) < N

    def add_step(step, total):
        depth = pl.ds(step * _DEPTH, _DEPTH)
        in_depth = step * _DEPTH + jnp.arange(_DEPTH) < K
        x = _load(x_ref.at[rows, depth], in_rows & in_depth[None])
        if transposed:
            w_mask = in_columns[:, None] & in_depth[None]
            w = _load(w_ref.at[expert, columns, depth], w_mask)
        else:
            w_mask = in_depth[:, None] & in_columns[None]
            w = _load(w_ref.at[expert, depth, columns], w_mask)
        return total + _dot(x, w, 1, 1 if transposed else 0)

    has_rows = (expert < E) & (start < end)
    num_steps = has_rows.astype(jnp.int32) * pl.cdiv(K, _DEPTH)
    zeros = jnp.zeros((ROWS, COLUMNS), jnp.float32)
    y = jax.lax.fori_loop(0, num_steps, add_step, zeros)
    mask = in_rows & in_columns[None]
    triton.store(y_ref.at[rows, columns], y.astype(y_ref.dtype), mask=mask)


def triton_by_experts(
    x_MD: jax.Array,
    y_MF: jax.Array,
    sizes_E: jax.Array,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Return x^T y [E, D, F] over the rows of each expert in x [M, D], y [M, F]."""
    E = sizes_E.size
    D = x_MD.shape[1]
    F = y_MF.shape[1]
    ends = jnp.cumsum(sizes_E)
    starts_E, ends_E = (x.astype(jnp.int32) for x in (ends - sizes_E, ends))
    call = pl.pallas_call(
        partial(_experts_kernel, D=D, F=F),
        out_shape=jax.ShapeDtypeStruct((E, D, F), dtype),
        grid=(E, pl.cdiv(D, ROWS), pl.cdiv(F, COLUMNS)),
        in_specs=[_WHOLE_ARRAY] * 4,
        out_specs=_WHOLE_ARRAY,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="grouped_experts",
    )
    return call(starts_E, ends_E, x_MD, y_MF)


def _experts_kernel(start_ref, end_ref, x_ref, y_ref, w_ref, *, D, F):
    expert, input_tile, output_tile = (pl.program_id(i) for i in range(3))
    start = start_ref[expert]
    end = end_ref[expert]
    input_start = input_tile * ROWS
    output_start = output_tile * COLUMNS
    inputs = pl.ds(input_start, ROWS)
    outputs = pl.ds(output_start, COLUMNS)
    in_inputs = input_start + jnp.arange(ROWS) < D
    in_outputs = output_start + jnp.arange(COLUMNS) < F

    def add_step(step, total):
        row = start + step * _DEPTH
        rows = pl.ds(row, _DEPTH)
        in_rows = row + jnp.arange(_DEPTH)[:, None] < end
        x = _load(x_ref.at[rows, inputs], in_rows & in_inputs[None])
        y = _load(y_ref.at[rows, outputs], in_rows & in_outputs[None])
        return total + _dot(x, y, 0, 0)

    zeros = jnp.zeros((ROWS, COLUMNS), jnp.float32)
    w = jax.lax.fori_loop(0, pl.cdiv(end - start, _DEPTH), add_step, zeros)
    mask = in_inputs[:, None] & in_outputs[None]
    triton.store(w_ref.at[expert, inputs, outputs], w.astype(w_ref.dtype), mask=mask)


def _load(ref: Any, mask: jax.Array) -> jax.Array:
    return triton.load(ref, mask=mask, other=0.0)


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    dim_numbers = (((dim_a,), (dim_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dim_numbers, preferred_element_type=jnp.float32)
