"""Products in float8, forward and both gradients, for NVIDIA GPUs from Hopper on.

Operands are e4m3, except the cotangent, which is e5m2. A product multiplies the float8
values, and then its result is scaled. XLA multiplies float8 only in this form: if an
operand is scaled first, XLA silently multiplies in bfloat16 (docs/log).

An array has one scale, a power of two. Scaling is then exact, and values in range are
rounded in the same way on every mesh. All shards of a weight share one scale.
Activations and cotangents have one scale per device, for its local rows.

Weights are gathered in float8. The backward pass rounds its operands again, except a
saved weight. This is cheap and gives operands the layout that the product needs.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.gather import WeightPlacement
from model.parts.eight_bits.quantization import contract, max_abs
from model.products import ProductOptions, Quantized, gradient_specs

FORWARD = jnp.float8_e4m3fn
COTANGENT = jnp.float8_e5m2


def float8_scale(
    x: jax.Array, dtype: DTypeLike, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Return the smallest power of two s such that x / s is in the range of a dtype.

    The scale is 1 if all values are zero or any value is not finite. `axes` are the
    manual mesh axes over which x is sharded.
    """
    ratio = max_abs(x, None, axes) / float(jnp.finfo(dtype).max)
    mantissa, exponent = jnp.frexp(ratio)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))


def to_float8(x: jax.Array, dtype: DTypeLike, scale: jax.Array) -> Quantized:
    """Round x / scale to a float8 dtype."""
    return Quantized((x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale)


def multiply(
    spec: str, a: Quantized, b: Quantized, out: DTypeLike, emulated: bool
) -> jax.Array:
    """Contract two quantized arrays and scale the result."""
    y = contract(spec, a, b, out, emulated)
    return (y * (a.scale * b.scale).astype(y.dtype)).astype(out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_product(options: ProductOptions, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply like `model.products.product`, with both gradients in float8 too."""
    return _float8_forward(options, a, b)[0]


def _gather_float8(
    b: jax.Array, scale: jax.Array, placement: WeightPlacement
) -> Quantized:
    b_8 = to_float8(b, FORWARD, scale)
    return b_8._replace(values=placement.gather(b_8.values))


def _float8_forward(options: ProductOptions, a: jax.Array, b: jax.Array):
    spec, compute, placement, emulated = options
    like_a = jnp.zeros((), a.dtype)
    like_b = jnp.zeros((), b.dtype)
    out = a.dtype
    a = a.astype(compute)
    scale_a = float8_scale(a, FORWARD)
    scale_b = float8_scale(b, FORWARD, placement.sharded_axes)
    b_8 = _gather_float8(b, scale_b, placement)
    y = multiply(spec, to_float8(a, FORWARD, scale_a), b_8, out, emulated)
    saved_b = b if placement.gather_again or not placement.sharded_dims else b_8.values
    return y, (a, scale_a, saved_b, scale_b, like_a, like_b)


def _float8_backward(options: ProductOptions, residuals, dy: jax.Array):
    spec, _, placement, emulated = options
    a, scale_a, b, scale_b, like_a, like_b = residuals
    b_8 = Quantized(b, scale_b)
    if placement.gather_again or not placement.sharded_dims:
        b_8 = _gather_float8(b, scale_b, placement)
    a_8 = to_float8(a, FORWARD, scale_a)
    dy_8 = to_float8(dy, COTANGENT, float8_scale(dy, COTANGENT))
    spec_da, spec_db = gradient_specs(spec)
    da = multiply(spec_da, dy_8, b_8, like_a.dtype, emulated)
    db = multiply(spec_db, a_8, dy_8, like_b.dtype, emulated)
    return da, placement.reduce_scatter(db)


float8_product.defvjp(_float8_forward, _float8_backward)
