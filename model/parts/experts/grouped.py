"""`grouped_product`: multiply each row by the matrix of its group (its expert).

XLA's own `ragged_dot` multiplies all rows by all experts' matrices on a CPU and on
NVIDIA's GPUs, and for the gradient of w on TPUs too (docs/log). Therefore each platform
has a kernel that multiplies each row once:

scan: any platform; a loop over blocks of rows (`grouped_scan.py`).
megablox: TPU; jax's own Pallas kernels, without eight-bit products.
triton: NVIDIA; a Pallas kernel that Triton compiles (`grouped_triton.py`).
ragged: XLA's `ragged_dot`, which plans trace and which tests use as the reference.

Operands and cotangents are rounded as `model.products.product` rounds them. In float8,
cotangents are e4m3 like operands, because Triton only multiplies equal dtypes.

Shapes: M rows, D inputs, F outputs, E experts.
"""

from functools import partial
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.lax import RaggedDotDimensionNumbers, ragged_dot_general
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from model.choices import Grouped
from model.parts.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.parts.experts import grouped_scan, grouped_triton
from model.products import Quantization


def choose_grouped(platform: str) -> Grouped:
    """Return the kernel for a platform."""
    kernels = {"tpu": Grouped.megablox, "cuda": Grouped.triton, "gpu": Grouped.triton}
    return kernels.get(platform, Grouped.scan)


def grouped_product(
    x_MD: Float[Array, "M D"],
    w_EDF: Float[Array, "E D F"],
    sizes_E: Int[Array, "E"],
    compute: DTypeLike,
    kernel: Grouped = Grouped.scan,
    float8: Quantization | None = None,
    swapped: bool = False,
) -> Float[Array, "M F"]:
    """Multiply each row by its expert's matrix, differentiably.

    Rows are sorted by expert. sizes_E holds the int32 number of rows of each expert;
    their sum is at most M. Operands are rounded to the dtype `compute`, or to float8
    with one scale for all experts. Sums are float32. The result has x's dtype, and each
    gradient has its operand's dtype. Rows after the last expert's rows are unused:
    their results and gradients are zero. `swapped` says that the matrices, and their
    gradients, lie in memory as [E, F, D]; megablox then reads and writes this order.
    """
    options = _Options(compute, kernel, float8, swapped)
    return _product(options, x_MD, w_EDF, sizes_E)  # pyright: ignore[reportReturnType]


class _Options(NamedTuple):
    """The static arguments of a grouped product."""

    compute: DTypeLike
    kernel: Grouped
    float8: Quantization | None
    swapped: bool

    def round(self, *arrays: jax.Array) -> list[tuple[jax.Array, jax.Array | None]]:
        """Round arrays; return each with its scale, or with None if not in float8."""
        if self.float8 is None:
            return [(x.astype(self.compute), None) for x in arrays]
        rounded = [to_float8(x, FORWARD, float8_scale(x, FORWARD)) for x in arrays]
        dtype = jnp.float32 if self.float8.emulated else FORWARD
        return [(x.values.astype(dtype), x.scale) for x in rounded]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: _Options, x, w, sizes):
    return _forward(options, x, w, sizes)[0]


def _forward(options: _Options, x, w, sizes):
    # Save the rounded x, as in `product`, but w itself, which is in memory anyway.
    rounded = x.astype(options.compute)
    (a, scale_a), (b, scale_b) = options.round(rounded, w)
    kernel = options.kernel
    swapped = options.swapped
    multiply = partial(grouped_rows, dtype=x.dtype, kernel=kernel, swapped=swapped)
    y = _zero_unused(multiply(a, b, sizes, transposed=False), sizes, kernel)
    return _scale(y, scale_a, scale_b), (rounded, w, sizes, jnp.zeros((), x.dtype))


def _backward(options: _Options, residuals, dy: jax.Array):
    x, w, sizes, like_x = residuals
    (dy, scale_dy), (a, scale_a), (b, scale_b) = options.round(dy, x, w)
    kernel = options.kernel
    swapped = options.swapped
    multiply = partial(grouped_rows, dtype=like_x.dtype, kernel=kernel, swapped=swapped)
    dx = multiply(dy, b, sizes, transposed=True)
    if kernel is Grouped.megablox:
        # XLA then computes x before it uses dx, and does not keep what x is made of.
        a, dx = jax.lax.optimization_barrier((a, dx))
    dx = _zero_unused(dx, sizes, kernel)
    dw = grouped_matrices(a, dy, sizes, dtype=w.dtype, kernel=kernel, swapped=swapped)
    return _scale(dx, scale_dy, scale_b), _scale(dw, scale_a, scale_dy), None


def _scale(y: jax.Array, a: jax.Array | None, b: jax.Array | None) -> jax.Array:
    """Multiply a product by the scales of its operands, if there are any."""
    return y if a is None or b is None else y * (a * b).astype(y.dtype)


_product.defvjp(_forward, _backward)


# `jit` puts the function's name into the compiled program, where a plan looks for it.
@partial(jax.jit, static_argnames=("transposed", "dtype", "kernel", "swapped"))
def grouped_rows(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    dtype: DTypeLike,
    kernel: Grouped,
    swapped: bool = False,
) -> jax.Array:
    """Multiply rows [M, D] by w[e] of their expert e, or rows [M, F] by w[e]^T.

    Unused rows of the result may have any value.
    """
    match kernel:
        case Grouped.ragged:
            dim_numbers = (((1,), (2 if transposed else 1,)), ((), ()))
            dims = RaggedDotDimensionNumbers(dim_numbers, (0,), (0,))
            return ragged_dot_general(x, w, sizes, dims, preferred_element_type=dtype)
        case Grouped.scan:
            return grouped_scan.multiply_rows(x, w, sizes, transposed, dtype)
        case Grouped.triton:
            return grouped_triton.triton_by_rows(x, w, sizes, transposed, dtype)
        case Grouped.megablox:
            tiling = _megablox_tile(x.shape[0])
            padded = _pad_rows(x, tiling[0])
            w = w.swapaxes(1, 2) if swapped else w
            y = gmm(
                padded, w, sizes, dtype, tiling, transpose_rhs=transposed != swapped
            )
            return y[: x.shape[0]]
        case _:
            assert_never(kernel)


def _zero_unused(y: jax.Array, sizes: jax.Array, kernel: Grouped) -> jax.Array:
    if kernel in (Grouped.scan, Grouped.triton):  # These kernels write zeros.
        return y
    return jnp.where(jnp.arange(y.shape[0])[:, None] < jnp.sum(sizes), y, 0)


@partial(jax.jit, static_argnames=("dtype", "kernel", "swapped"))
def grouped_matrices(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    *,
    dtype: DTypeLike,
    kernel: Grouped,
    swapped: bool = False,
) -> jax.Array:
    """Return x^T dy [E, D, F] over the rows of each expert in x [M, D], dy [M, F]."""
    match kernel:
        case Grouped.ragged:
            dims = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
            return ragged_dot_general(x, dy, sizes, dims, preferred_element_type=dtype)
        case Grouped.scan:
            return grouped_scan.multiply_by_expert(x, dy, sizes, dtype)
        case Grouped.triton:
            return grouped_triton.triton_by_experts(x, dy, sizes, dtype)
        case Grouped.megablox:
            tiling = _megablox_tile(x.shape[0])
            x = _pad_rows(x, tiling[0])
            dy = _pad_rows(dy, tiling[0])
            a, b = (dy, x) if swapped else (x, dy)
            dw = tgmm(a.swapaxes(0, 1), b, sizes, dtype, tiling)
            return dw.swapaxes(1, 2) if swapped else dw
        case _:
            assert_never(kernel)


def tile_of(kernel: Grouped, num_rows: int) -> tuple[int, int]:
    """Return the rows and the columns of the tiles in which a kernel multiplies.

    A kernel computes a tile once for each expert that has rows in it. The result is
    (1, 1) if a kernel multiplies no tiles.
    """
    match kernel:
        case Grouped.megablox:
            return _megablox_tile(num_rows)[:2]
        case Grouped.triton:
            return grouped_triton.ROWS, grouped_triton.COLUMNS
        case Grouped.scan | Grouped.ragged:
            return 1, 1
        case _:
            assert_never(kernel)


def _megablox_tile(M: int) -> tuple[int, int, int]:
    # Tiles up to 512 fit the vector memory of v5e, v5p and v6e, forward and backward
    # (checked by compiling; speed not measured).
    return (next(n for n in (128, 256, 512) if n >= min(M, 512)), 512, 512)


def _pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))
