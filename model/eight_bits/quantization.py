"""What products with operands of eight bits have in common.

An array x is rounded to values of eight bits times a scale, one for all of it
(float8.py beside this) or one a row (int8.py). Products are of the values themselves,
and their results are scaled. Scales come from the largest value at hand, so that there
is no state. What is finite has a finite scale that is not zero; what is not makes
results that are not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.choices import ComputeDtype


class Quantization(NamedTuple):
    """How linear layers are run in eight bits.

    dtype: float8 or int8.
    emulated: whether float32 products of the rounded values stand for those that the
        machine does not have.
    """

    dtype: ComputeDtype
    emulated: bool = False


class Scaled(NamedTuple):
    """An array of eight bits that stands for values x scale."""

    values: jax.Array
    scale: jax.Array


def largest(
    x: jax.Array, dims: tuple[int, ...] | None = None, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Return the largest absolute value in float32.

    Args:
        x: a device's part of an array.
        dims: of which it is the largest, they stay with size 1; None: of all.
        axes: mesh axes by hand along which other devices have the other parts.
    """
    most = jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None)
    most = most.astype(jnp.float32)
    return jax.lax.pmax(most, axes) if axes else most


def largest_value(dtype: DTypeLike) -> float:
    """Return the largest value of a dtype of eight bits."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)


def contract(
    spec: str, a: Scaled, b: Scaled, sums: DTypeLike, emulated: bool
) -> jax.Array:
    """Contract the values of two arrays by an einsum, with sums of a dtype."""
    operands = a.values, b.values
    if emulated:
        operands = (values.astype(jnp.float32) for values in operands)
        sums = jnp.float32
    return jnp.einsum(spec, *operands, preferred_element_type=sums)


def transposed(spec: str) -> tuple[str, str]:
    """Return the einsums of both gradients: of (dy, b), and of (a, dy)."""
    operands, result = spec.split("->")
    left, right = operands.split(",")
    return f"{result},{right}->{left}", f"{left},{result}->{right}"
