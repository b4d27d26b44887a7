"""Products in float8, forward and both gradients, for NVIDIA's GPUs from Hopper on.

Operands are e4m3, but for the cotangent, which is e5m2. The products are of float8
arrays themselves and their results are scaled: only in this form does XLA multiply
float8; an operand that is scaled before it is multiplied it takes for a bfloat16 one,
silently (docs/log.md). An array has one scale, a power of two, so that scaling is exact
and what lies in range is rounded alike on any mesh: a weight's is that of the whole,
wherever its parts lie; a device's rows of activations and cotangents have their own.

Weights are gathered in float8. For the backward pass is kept what products of the
compute dtype keep: to round it again is cheap, and lays it out as the product wants it.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.eight_bits.quantization import Scaled, contract, largest, transposed
from model.gather import Parts

FORWARD, COTANGENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def float8_scale(
    x: jax.Array, dtype: DTypeLike, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Return the least power of two by which x, divided, fits into a float8 dtype.

    1 if all of x is zero, or if something of it is not finite.

    Args:
        x: a device's part of an array.
        dtype: e4m3 or e5m2.
        axes: mesh axes by hand along which other devices have the other parts.
    """
    most = largest(x, None, axes) / float(jnp.finfo(dtype).max)
    mantissa, exponent = jnp.frexp(most)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))


def to_float8(x: jax.Array, dtype: DTypeLike, scale: jax.Array) -> Scaled:
    """Round x / scale to a float8 dtype."""
    return Scaled((x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale)


def multiply(
    spec: str, a: Scaled, b: Scaled, out: DTypeLike, emulated: bool
) -> jax.Array:
    """Contract two arrays by an einsum."""
    y = contract(spec, a, b, out, emulated)
    return (y * (a.scale * b.scale).astype(y.dtype)).astype(out)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def float8_product(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    compute: DTypeLike,
    parts: Parts,
    emulated: bool,
) -> jax.Array:
    """Multiply as `model.linear.product`, all three products in float8.

    The scale of a weight is that of the whole, wherever its parts lie; a device's rows
    of activations and cotangents have their own.
    """
    return _float8_forward(spec, a, b, compute, parts, emulated)[0]


def _float8_forward(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    compute: DTypeLike,
    parts: Parts,
    emulated: bool,
):
    like_a, like_b = jnp.zeros((), a.dtype), jnp.zeros((), b.dtype)
    out, a = a.dtype, a.astype(compute)
    scale_a = float8_scale(a, FORWARD)
    scale_b = float8_scale(b, FORWARD, parts.axes)
    b_8 = to_float8(b, FORWARD, scale_b)
    b_8 = b_8._replace(values=parts.gather(b_8.values))
    y = multiply(spec, to_float8(a, FORWARD, scale_a), b_8, out, emulated)
    kept = b if parts.gather_again or not parts.cut else b_8.values
    return y, (a, scale_a, kept, scale_b, like_a, like_b)


def _float8_backward(
    spec: str, compute: DTypeLike, parts: Parts, emulated: bool, residuals, dy
):
    a, scale_a, b, scale_b, like_a, like_b = residuals
    b_8 = Scaled(b, scale_b)
    if parts.gather_again or not parts.cut:
        b_8 = to_float8(b, FORWARD, scale_b)
        b_8 = b_8._replace(values=parts.gather(b_8.values))
    a_8 = to_float8(a, FORWARD, scale_a)
    dy_8 = to_float8(dy, COTANGENT, float8_scale(dy, COTANGENT))
    of_a, of_b = transposed(spec)
    da = multiply(of_a, dy_8, b_8, like_a.dtype, emulated)
    db = multiply(of_b, a_8, dy_8, like_b.dtype, emulated)
    return da, parts.scatter(db)


float8_product.defvjp(_float8_forward, _float8_backward)
