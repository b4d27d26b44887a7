"""Eight-bit operands for float8 and int8 products.

An array x is rounded to eight-bit values times a scale: one scale for the whole array
(float8.py), or one for each row (int8.py). Products multiply the eight-bit values, and
their results are scaled. A scale is computed from the largest current value, so no
scale is carried from step to step. The scale of finite values is finite and not zero.
Non-finite values give non-finite results.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.choices import ComputeDtype
from model.gather import WeightPlacement


class Quantization(NamedTuple):
    """How linear layers multiply in eight bits.

    dtype: float8 or int8.
    emulated: whether float32 products of rounded values replace eight-bit products.
    """

    dtype: ComputeDtype
    emulated: bool = False


class ProductOptions(NamedTuple):
    """The static arguments of a product (model/linear.py)."""

    spec: str
    compute: DTypeLike
    placement: WeightPlacement
    emulated: bool = False


class Quantized(NamedTuple):
    """An eight-bit array that represents values times scale."""

    values: jax.Array
    scale: jax.Array


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


def largest_value(dtype: DTypeLike) -> float:
    """Return the largest value of an eight-bit dtype."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)


def contract(
    spec: str, a: Quantized, b: Quantized, sum_dtype: DTypeLike, emulated: bool
) -> jax.Array:
    """Contract eight-bit values with sums in `sum_dtype`, or in float32 if emulated."""
    operands = a.values, b.values
    if emulated:
        operands = (values.astype(jnp.float32) for values in operands)
        sum_dtype = jnp.float32
    return jnp.einsum(spec, *operands, preferred_element_type=sum_dtype)


def gradient_specs(spec: str) -> tuple[str, str]:
    """Return the einsums of both gradients: (dy, b) -> da and (a, dy) -> db."""
    operands, result = spec.split("->")
    a, b = operands.split(",")
    return f"{result},{b}->{a}", f"{a},{result}->{b}"
