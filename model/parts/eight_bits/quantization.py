"""Eight-bit operands for float8 and int8 products.

An array x is rounded to eight-bit values times a scale: one scale for the whole array
(float8.py), or one for each row (int8.py). Products multiply the eight-bit values, and
their results are scaled. A scale is computed from the largest current value, so no
scale is carried from step to step. The scale of finite values is finite and not zero.
Non-finite values give non-finite results.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.products import Quantized


def max_abs(
    x: jax.Array, dims: tuple[int, ...] | None = None, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Return the largest absolute value over `dims` in float32.

    Reduced dims keep size 1; None reduces all dims to a scalar. `axes` are the manual
    mesh axes over which the reduced dims are sharded.
    """
    local_max = jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None)
    local_max = local_max.astype(jnp.float32)
    return jax.lax.pmax(local_max, axes) if axes else local_max


def contract(
    spec: str, a: Quantized, b: Quantized, sum_dtype: DTypeLike, emulated: bool
) -> jax.Array:
    """Contract eight-bit values with sums in `sum_dtype`, or in float32 if emulated."""
    operands = a.values, b.values
    if emulated:
        operands = (values.astype(jnp.float32) for values in operands)
        sum_dtype = jnp.float32
    return jnp.einsum(spec, *operands, preferred_element_type=sum_dtype)
