"""The product of activations and a weight, and the interface of eight-bit products.

Operands are rounded to the compute dtype, and products accumulate in float32. The
backward pass rounds the cotangent too, so that all three products of a linear layer run
on fast matrix units. With plain `x @ w`, XLA's CPU backend would convert bfloat16
operands to float32, and a float32 cotangent would make a GPU multiply in TF32
(docs/log). Operands are neither flattened nor transposed, because XLA's CPU backend is
fast on einsums with the dims of the weight as it is stored.

Products in eight bits are in model/parts/eight_bits/.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from model.choices import ComputeDtype
from model.gather import UNSHARDED, WeightPlacement


class ProductOptions(NamedTuple):
    """The static arguments of `product`."""

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
        """Return the product of two arrays, as `product` does."""
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


def product(
    spec: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    compute: DTypeLike,
    placement: WeightPlacement = UNSHARDED,
    quantization: Quantization | None = None,
    keys_BT: Key[Array, "B T"] | None = None,
) -> Float[Array, "..."]:
    """Return the einsum of two arrays, such as "ab,bc->ac". It is differentiable.

    Every letter of an operand must also be in the other operand or in the result. With
    quantization, no letter may be in all three.

    Operands are rounded to the dtype `compute`, or to eight bits with `quantization`.
    If b is a weight, `placement` says how b is sharded: the product gathers b, and
    reduce-scatters its gradient. int8 rounds the cotangent stochastically if `keys_BT`
    has a random key for each position of a, and to the nearest otherwise. The result
    has a's dtype, and each gradient has its operand's dtype.
    """
    options = ProductOptions(spec, compute, placement)
    if quantization is None:
        return _product(options, a, b)  # pyright: ignore[reportReturnType]
    return quantization.multiply(options, a, b, keys_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: ProductOptions, a: jax.Array, b: jax.Array) -> jax.Array:
    gathered = options.placement.gather_as(b, options.compute)
    return einsum(options.spec, a, gathered, options.compute, a.dtype)


def einsum(
    spec: str, a: jax.Array, b: jax.Array, compute: DTypeLike, out: DTypeLike
) -> jax.Array:
    """Contract two arrays rounded to `compute`. The result has the dtype `out`."""
    return jnp.einsum(
        spec, a.astype(compute), b.astype(compute), preferred_element_type=out
    )


def _forward(options: ProductOptions, a: jax.Array, b: jax.Array):
    # The backward pass needs only the rounded a. If b is not sharded, b is saved
    # unrounded: the parameter is in memory anyway, and rounding it again is cheap. A
    # gathered b is saved only if the backward pass recomputes the layer, because the
    # gathered copy is then freed after the layer.
    spec, compute, placement, _ = options
    a_rounded = a.astype(compute)
    gathered = placement.gather_as(b, compute) if placement.sharded_dims else b
    y = einsum(spec, a_rounded, gathered, compute, a.dtype)
    saved_b = b if placement.gather_again else gathered
    return y, (a_rounded, saved_b, jnp.zeros((), a.dtype), jnp.zeros((), b.dtype))


def _backward(options: ProductOptions, residuals, dy: jax.Array):
    spec, compute, placement, _ = options
    a, b, like_a, like_b = residuals
    if placement.gather_again:
        b = placement.gather_as(b, compute)
    dy = dy.astype(compute)
    spec_da, spec_db = gradient_specs(spec)
    da = einsum(spec_da, dy, b, compute, like_a.dtype)
    db = einsum(spec_db, a, dy, compute, like_b.dtype)
    return da, placement.reduce_scatter(db)


_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(
    shard: jax.Array,
    placement: WeightPlacement,
    compute: DTypeLike,
    float8: GatheringQuantization | None,
) -> jax.Array:
    """Gather a weight in the compute dtype or in float8; reduce-scatter its gradient.

    `product` gathers its weight itself. This function is for a weight of which others
    compute the products. The values are already rounded, so a product that rounds them
    again does not change them. The gradient has the dtype of the result, which holds
    rounded values and sums over devices exactly. Products that are added up need a
    result in float32.
    """
    if not placement.sharded_dims:
        return shard
    if float8 is None:
        dtype = jnp.promote_types(compute, placement.reduce_dtype)
        return placement.gather_as(shard, compute).astype(dtype)
    return float8.gather(shard, placement)


def _gather_forward(shard, placement: WeightPlacement, compute, float8):
    like_shard = jnp.zeros((), shard.dtype)
    return gather_weight(shard, placement, compute, float8), like_shard


def _gather_backward(placement: WeightPlacement, compute, float8, like_shard, dweight):
    return (placement.reduce_scatter(dweight).astype(like_shard.dtype),)


gather_weight.defvjp(_gather_forward, _gather_backward)


def expand_to(x: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """Return x with leading dims of size 1, so that it has `ndim` dims."""
    return jnp.expand_dims(x, range(ndim - x.ndim))
