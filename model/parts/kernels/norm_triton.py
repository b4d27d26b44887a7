"""LayerNorm and RMSNorm on NVIDIA's GPUs: two Pallas kernels that Triton compiles.

Each kernel reads its operands once. XLA:GPU reads the rows twice in the forward pass,
and makes three kernels and an addition of the backward pass (docs/log/gpu.md).

Shapes: N rows, D dims of a row, P programs, R rows of a program at once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from model.execution import NormKernel

_MOST_DIMS = 8192  # A longer row does not fit into a program's registers.
# These sizes are not tuned on a GPU.
_ELEMENTS = 4096  # elements of an array that a program has at once
_BACKWARD_PROGRAMS = 512  # about four for each multiprocessor of an H100
_WHOLE_ARRAY = pl.BlockSpec(memory_space=pl.ANY)
_COMPILER_PARAMS = triton.CompilerParams(num_warps=8, num_stages=2)


def choose_norm(platform: str, num_dims: int) -> NormKernel | None:
    """Return `normalize` on a GPU, unless a row of `num_dims` is too long."""
    return normalize if platform == "gpu" and num_dims <= _MOST_DIMS else None


def normalize(
    x: Float[Array, "*dims D"],
    scale_D: Float[Array, "D"],
    bias_D: Float[Array, "D"] | None,
    epsilon: float,
    centred: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "*dims D"], Float[Array, "*dims D"]]:
    """Return x, and x normalized over its last dim in float32, in the dtype of x.

    Use the returned x for the residual: the kernel of the backward pass then adds the
    gradient of the residual, which would otherwise take another pass over memory.

    Args:
        x: the rows.
        scale_D: multiplies the normalized rows.
        bias_D: is added to them, if it is not None.
        epsilon: added to the variance.
        centred: whether the mean is subtracted (LayerNorm, not RMSNorm).
        interpret: whether Pallas runs the kernels on a CPU, for tests.
    """
    return _normalize(_Options(epsilon, centred, interpret), x, scale_D, bias_D)


class _Options(NamedTuple):
    """The static arguments of a norm."""

    epsilon: float
    centred: bool
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(options: _Options, x, scale_D, bias_D):
    return _forward(options, x, scale_D, bias_D)[0]


def _forward(options: _Options, x, scale_D, bias_D):
    D = x.shape[-1]
    x_ND = x.reshape(-1, D)
    shape = jax.ShapeDtypeStruct(x_ND.shape, x.dtype)
    blocks = pl.cdiv(len(x_ND), _rows_at_once(D))
    vectors = [v.astype(jnp.float32) for v in (scale_D, bias_D) if v is not None]
    y_ND = _call(_forward_kernel, options, shape, blocks)(x_ND, *vectors)
    return (x, y_ND.reshape(x.shape)), (x, scale_D, bias_D)


def _backward(options: _Options, residuals, cotangents):
    x, scale_D, bias_D = residuals
    D = x.shape[-1]
    dresidual_ND, dy_ND = (d.reshape(-1, D) for d in cotangents)
    x_ND = x.reshape(-1, D)
    programs = min(_BACKWARD_PROGRAMS, pl.cdiv(len(x_ND), _rows_at_once(D)))
    sums = jax.ShapeDtypeStruct((programs, D), jnp.float32)
    shapes = jax.ShapeDtypeStruct(x_ND.shape, x.dtype), sums, sums
    # The gradient of x takes the memory of dy, which nothing else needs.
    call = _call(_backward_kernel, options, shapes, programs, {1: 0})
    scale = scale_D.astype(jnp.float32)
    dx_ND, dscale_PD, dbias_PD = call(x_ND, dy_ND, dresidual_ND, scale)
    dscale_D = jnp.sum(dscale_PD, axis=0).astype(scale_D.dtype)
    dbias_D = None
    if bias_D is not None:
        dbias_D = jnp.sum(dbias_PD, axis=0).astype(bias_D.dtype)
    return dx_ND.reshape(x.shape), dscale_D, dbias_D


_normalize.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    options: _Options,
    out_shape: Any,
    programs: int,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Return a call of a kernel. `aliases` maps operands to results in their memory."""
    return pl.pallas_call(
        partial(kernel, options=options),
        out_shape=out_shape,
        grid=(programs,),
        out_specs=jax.tree.map(lambda _: _WHOLE_ARRAY, out_shape),
        input_output_aliases=aliases or {},
        compiler_params=_COMPILER_PARAMS,
        interpret=options.interpret,
        name=kernel.__name__.strip("_").replace("kernel", "norm"),
    )


def _rows_at_once(D: int) -> int:
    return max(1, _ELEMENTS // _padded(D))


def _padded(D: int) -> int:
    """Return the smallest power of two from D on: Triton's arrays have such sizes."""
    return 1 << (D - 1).bit_length()


def _forward_kernel(x_ref, scale_ref, *refs, options: _Options):
    *bias_refs, y_ref = refs
    D = x_ref.shape[1]
    block = _Block(pl.program_id(0), *x_ref.shape)
    x_RD = block.load(x_ref)
    normalized_RD, _ = _normalize_rows(x_RD, block.in_row, options, D)
    y_RD = normalized_RD * block.load_vector(scale_ref)
    for bias_ref in bias_refs:
        y_RD += block.load_vector(bias_ref)
    block.store(y_ref, y_RD)


def _backward_kernel(
    x_ref,
    dy_ref,
    dresidual_ref,
    scale_ref,
    dx_ref,
    dscale_ref,
    dbias_ref,
    *,
    options: _Options,
):
    N, D = x_ref.shape
    program = pl.program_id(0)
    num_programs = dscale_ref.shape[0]
    num_blocks = pl.cdiv(N, _rows_at_once(D))

    def add_block(step, sums):
        dscale_RD, dbias_RD = sums
        block = _Block(program + step * num_programs, N, D)
        x_RD = block.load(x_ref)
        dy_RD = block.load(dy_ref)
        normalized_RD, factor_R1 = _normalize_rows(x_RD, block.in_row, options, D)
        dnormalized_RD = dy_RD * block.load_vector(scale_ref)
        along_R1 = _mean(dnormalized_RD * normalized_RD, D)
        dcentred_RD = dnormalized_RD - normalized_RD * along_R1
        if options.centred:
            dcentred_RD -= _mean(dnormalized_RD, D)
        block.store(dx_ref, dcentred_RD * factor_R1 + block.load(dresidual_ref))
        return dscale_RD + dy_RD * normalized_RD, dbias_RD + dy_RD

    zeros = jnp.zeros((_rows_at_once(D), _padded(D)), jnp.float32)
    steps = pl.cdiv(num_blocks - program, num_programs)
    sums = jax.lax.fori_loop(0, steps, add_block, (zeros, zeros))
    dims = jnp.arange(_padded(D))
    for sum_ref, sum_RD in zip((dscale_ref, dbias_ref), sums, strict=True):
        sum_D = jnp.sum(sum_RD, axis=0)
        triton.store(sum_ref.at[program, pl.ds(0, dims.size)], sum_D, mask=dims < D)


def _normalize_rows(
    x_RD: jax.Array, in_row_1D: jax.Array, options: _Options, D: int
) -> tuple[jax.Array, jax.Array]:
    """Return the normalized rows, and the factor of each row."""
    if options.centred:
        x_RD = jnp.where(in_row_1D, x_RD - _mean(x_RD, D), 0.0)
    factor_R1 = jax.lax.rsqrt(_mean(x_RD * x_RD, D) + options.epsilon)
    return x_RD * factor_R1, factor_R1


def _mean(x_RD: jax.Array, D: int) -> jax.Array:
    """Return the mean of the first D elements of each row. All others are zero."""
    return (jnp.sum(x_RD, axis=1) / D)[:, None]


class _Block:
    """R rows of an array [N, D], with masks of what lies outside."""

    def __init__(self, number: Any, N: int, D: int):
        R = _rows_at_once(D)
        dims = jnp.arange(_padded(D))
        self.in_row = (dims < D)[None]
        in_array = (number * R + jnp.arange(R) < N)[:, None]
        self._mask = in_array & self.in_row
        self._index = pl.ds(number * R, R), pl.ds(0, dims.size)

    def load(self, ref: Any) -> jax.Array:
        """Load the rows as float32."""
        x = triton.load(ref.at[self._index], mask=self._mask, other=0.0)
        return x.astype(jnp.float32)

    def load_vector(self, ref: Any) -> jax.Array:
        """Load a vector [1, D]."""
        index = self._index[1]
        return triton.load(ref.at[index], mask=self.in_row[0], other=0.0)[None]

    def store(self, ref: Any, values: jax.Array) -> None:
        """Store rows in the dtype of the array."""
        triton.store(ref.at[self._index], values.astype(ref.dtype), mask=self._mask)
