"""Products in float8 and in int8, which the model takes as a value."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from model.choices import ComputeDtype
from model.gather import WeightPlacement
from model.parts.eight_bits.float8 import (
    FORWARD,
    float8_product,
    float8_scale,
    to_float8,
)
from model.parts.eight_bits.int8 import contracted_dims, int8_product, to_int8
from model.products import ProductOptions, Quantized


@dataclass(frozen=True)
class Float8:
    """Products in float8; `emulated` multiplies rounded values in float32."""

    emulated: bool = False
    dtype: ComputeDtype = ComputeDtype.float8
    is_random: bool = False

    def multiply(
        self, options: ProductOptions, a: jax.Array, b: jax.Array, keys_BT: object
    ) -> jax.Array:
        """Return the product of two arrays."""
        return float8_product(options._replace(emulated=self.emulated), a, b)

    def round_left(self, spec: str, a: jax.Array) -> Quantized:
        """Return the left operand as `multiply` rounds it."""
        return to_float8(a, FORWARD, float8_scale(a, FORWARD))

    def gather(self, shard: jax.Array, placement: WeightPlacement) -> jax.Array:
        """Gather a weight in float8, and return it in the dtype of the shard."""
        scale = float8_scale(shard, FORWARD, placement.sharded_axes)
        values, scale = to_float8(shard, FORWARD, scale)
        weight = placement.gather(values).astype(jnp.float32) * scale
        return weight.astype(shard.dtype)


@dataclass(frozen=True)
class Int8:
    """Products in int8; `emulated` multiplies rounded values in float32."""

    emulated: bool = False
    dtype: ComputeDtype = ComputeDtype.int8
    is_random: bool = True

    def multiply(
        self,
        options: ProductOptions,
        a: jax.Array,
        b: jax.Array,
        keys_BT: jax.Array | None,
    ) -> jax.Array:
        """Return the product of two arrays."""
        options = options._replace(emulated=self.emulated)
        return int8_product(options, a, b, keys_BT)

    def round_left(self, spec: str, a: jax.Array) -> Quantized:
        """Return the left operand as `multiply` rounds it."""
        dims, _, result = re.split(",|->", spec)
        return to_int8(a, contracted_dims(dims, result))


RECIPES = {ComputeDtype.float8: Float8, ComputeDtype.int8: Int8}
