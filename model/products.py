"""The interface of products in eight bits; model/parts/eight_bits implements it."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.choices import ComputeDtype
from model.gather import WeightPlacement


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


@runtime_checkable
class Quantization(Protocol):
    """Products in eight bits. An instance is hashed by its values and its class."""

    @property
    def dtype(self) -> ComputeDtype:
        """Return float8 or int8."""
        ...

    @property
    def emulated(self) -> bool:
        """Return whether float32 products of rounded values replace the products."""
        ...

    @property
    def is_random(self) -> bool:
        """Return whether the products round stochastically, and so need keys."""
        ...

    def multiply(
        self,
        options: ProductOptions,
        a: jax.Array,
        b: jax.Array,
        keys_BT: jax.Array | None,
    ) -> jax.Array:
        """Return the product of two arrays, as `model.linear.product` does."""
        ...

    def round_left(self, spec: str, a: jax.Array) -> Quantized:
        """Return the left operand as `multiply` rounds it."""
        ...


@runtime_checkable
class GatheringQuantization(Quantization, Protocol):
    """Products in eight bits that also gather a weight in eight bits."""

    def gather(self, shard: jax.Array, placement: WeightPlacement) -> jax.Array:
        """Gather a weight in eight bits, and return it in the dtype of the shard."""
        ...


def largest_value(dtype: DTypeLike) -> float:
    """Return the largest value of an eight-bit dtype."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)


def gradient_specs(spec: str) -> tuple[str, str]:
    """Return the einsums of both gradients: (dy, b) -> da and (a, dy) -> db."""
    operands, result = spec.split("->")
    a, b = operands.split(",")
    return f"{result},{b}->{a}", f"{a},{result}->{b}"
