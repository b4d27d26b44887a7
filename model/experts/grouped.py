"""The one way to multiply rows by a matrix of their own group: `grouped_product`.

Rows x[M, D] lie sorted by expert, sizes[E] of them each; every expert has its matrix of
w[E, D, F]. Each row is multiplied once, whatever the sizes are: XLA's own `ragged_dot`
multiplies all rows by all experts' matrices on a CPU and on NVIDIA's GPUs, and for the
gradient of w on TPUs too (docs/log). So each platform has a body of its own:

scan: any platform; a loop over blocks of rows (model/experts/grouped_scan.py).
megablox: TPU; jax's own Pallas kernels.
triton: NVIDIA; a Pallas kernel that Triton compiles (model/experts/grouped_triton.py).
ragged: XLA's own, for a plan to trace and for tests to compare with.

Operands and cotangents are rounded as `model.linear.product` rounds them; to float8, if
asked for, all of them to e4m3, since Triton multiplies operands of one type; not by
megablox, which has no products of eight bits.

Shapes: M rows, D inputs, F outputs, E experts.
"""

from functools import partial
from typing import assert_never

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers, ragged_dot_general
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from model.choices import Grouped
from model.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.eight_bits.quantization import Quantization
from model.experts import grouped_scan, grouped_triton

_LANES = 128


def choose_grouped(platform: str) -> Grouped:
    """Return the body of a platform."""
    best = {"tpu": Grouped.megablox, "cuda": Grouped.triton, "gpu": Grouped.triton}
    return best.get(platform, Grouped.scan)


def grouped_product(
    x_MD: Float[Array, "M D"],
    w_EDF: Float[Array, "E D F"],
    sizes_E: Int[Array, "E"],
    compute: DTypeLike,
    body: Grouped = Grouped.scan,
    float8: Quantization | None = None,
) -> Float[Array, "M F"]:
    """Multiply each row by its expert's matrix, differentiably.

    Args:
        x_MD: rows, sorted by expert.
        w_EDF: one matrix for each expert.
        sizes_E: int32 rows of each expert; their sum is at most M.
        compute: dtype of the products' operands; sums are float32.
        body: the kernel of the platform.
        float8: use it instead of `compute`. Each operand has one scale for all experts.

    Returns:
        [M, F] in x's dtype. Rows after those of the last expert are zeros, and so is
        their gradient. Each gradient has its operand's dtype.
    """
    return _product(x_MD, w_EDF, sizes_E, compute, body, float8)  # pyright: ignore[reportReturnType]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(
    x, w, sizes, compute: DTypeLike, body: Grouped, float8: Quantization | None
):
    return _forward(x, w, sizes, compute, body, float8)[0]


def _forward(
    x, w, sizes, compute: DTypeLike, body: Grouped, float8: Quantization | None
):
    # The rounded x is saved, as in `product`; w is alive anyway.
    rounded = x.astype(compute)
    (a, of_a), (b, of_b) = _operands(compute, float8, rounded, w)
    y = grouped_rows(a, b, sizes, False, x.dtype, body)
    return _scaled(y, of_a, of_b), (rounded, w, sizes, jnp.zeros((), x.dtype))


def _backward(
    compute: DTypeLike,
    body: Grouped,
    float8: Quantization | None,
    residuals,
    dy: jax.Array,
):
    x, w, sizes, like_x = residuals
    (dy, of_dy), (a, of_a), (b, of_b) = _operands(compute, float8, dy, x, w)
    dx = grouped_rows(dy, b, sizes, True, like_x.dtype, body)
    dw = grouped_matrices(a, dy, sizes, w.dtype, body)
    return _scaled(dx, of_dy, of_b), _scaled(dw, of_a, of_dy), None


def _operands(
    compute: DTypeLike, float8: Quantization | None, *arrays: jax.Array
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Round arrays; return pairs with their scales, None but for float8."""
    if float8 is None:
        return [(x.astype(compute), None) for x in arrays]
    rounded = [to_float8(x, FORWARD, float8_scale(x, FORWARD)) for x in arrays]
    wide = jnp.float32 if float8.emulated else FORWARD
    return [(x.values.astype(wide), x.scale) for x in rounded]


def _scaled(y: jax.Array, a: jax.Array | None, b: jax.Array | None) -> jax.Array:
    return y if a is None or b is None else y * (a * b).astype(y.dtype)


_product.defvjp(_forward, _backward)


# Jitted for their names: by these a plan finds kernels in a compiled program.
@partial(jax.jit, static_argnums=(3, 4, 5))
def grouped_rows(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    transposed: bool,
    dtype: DTypeLike,
    body: Grouped,
) -> jax.Array:
    """Multiply rows [M, D] by w[e], or rows [M, F] by w[e] transposed."""
    match body:
        case Grouped.ragged:
            pairs = (((1,), (2 if transposed else 1,)), ((), ()))
            of_rows = RaggedDotDimensionNumbers(pairs, (0,), (0,))
            y = ragged_dot_general(x, w, sizes, of_rows, preferred_element_type=dtype)
            return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes), y, 0)
        case Grouped.scan:
            return grouped_scan.by_rows(x, w, sizes, transposed, dtype)
        case Grouped.triton:
            return grouped_triton.triton_by_rows(x, w, sizes, transposed, dtype)
        case Grouped.megablox:
            return _megablox_rows(x, w, sizes, transposed, dtype)
        case _:
            assert_never(body)


def _megablox_rows(
    x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool, dtype: DTypeLike
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    M, tiling = x.shape[0], _tiling(x.shape[0])
    padded = _padded(x, tiling[0])
    y = gmm(padded, w, sizes, dtype, tiling, transpose_rhs=transposed)[:M]
    # Tiles without a row of an expert are not written.
    return jnp.where(jnp.arange(M)[:, None] < jnp.sum(sizes), y, 0)


@partial(jax.jit, static_argnums=(3, 4))
def grouped_matrices(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: DTypeLike, body: Grouped
) -> jax.Array:
    """Multiply an expert's rows [M, D], transposed, by its rows [M, F]."""
    match body:
        case Grouped.ragged:
            of_experts = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
            return ragged_dot_general(
                x, dy, sizes, of_experts, preferred_element_type=dtype
            )
        case Grouped.scan:
            return grouped_scan.by_experts(x, dy, sizes, dtype)
        case Grouped.triton:
            return grouped_triton.triton_by_experts(x, dy, sizes, dtype)
        case Grouped.megablox:
            return _megablox_matrices(x, dy, sizes, dtype)
        case _:
            assert_never(body)


def _megablox_matrices(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: DTypeLike
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = _tiling(x.shape[0])
    x, dy = _padded(x, tiling[0]), _padded(dy, tiling[0])
    return tgmm(x.swapaxes(0, 1), dy, sizes, dtype, tiling)


def _tiling(M: int) -> tuple[int, int, int]:
    # Up to 512 fits the vector memory of v5e, v5p and v6e, forward and backward
    # (checked by compiling). Which is fastest was not measured.
    return (next(n for n in (128, 256, 512) if n >= min(M, 512)), 512, 512)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))
