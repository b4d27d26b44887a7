"""The product of activations and a weight, and the linear layer.

Operands are rounded to the compute dtype, and products accumulate in float32. The
backward pass rounds the cotangent too, so that all three products of a linear layer run
on fast matrix units. Products in eight bits are in model/parts/eight_bits/. With plain
`x @ w`, XLA's CPU backend would convert bfloat16 operands to float32, and a float32
cotangent would make a GPU multiply in TF32 (docs/log). Operands are neither flattened
nor transposed, because XLA's CPU backend is fast on einsums with the dims of the weight
as it is stored.
"""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from model.execution import NO_CONTEXT, CallContext, Execution
from model.gather import UNSHARDED, WeightPlacement
from model.params import Kind, ParamInfo
from model.parts.taps import count_rounding
from model.products import (
    GatheringQuantization,
    ProductOptions,
    Quantization,
    gradient_specs,
)
from model.scopes import part_scope


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
    dy, (spec_da, spec_db) = dy.astype(compute), gradient_specs(spec)
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


class Linear(nnx.Module):
    """A weight, its einsum, and an optional bias over the output dims."""

    def __init__(
        self,
        name: str,
        spec: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        std: float,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        kind: Kind = Kind.matrix,
        padding: int = 0,
    ):
        """Draw the weight from N(0, std²). The bias starts at zero.

        `name` is the scope in traced programs, and `spec` is the einsum of `product`.
        `shape` is the weight's shape without padding, and `axes` are its logical axes.
        `padding` is the number of zeros that are appended along the last dim.
        """
        operands, result = spec.split("->")
        num_inputs = sum(letter not in result for letter in operands.split(",")[1])
        weight = std * jax.random.normal(rngs.params(), shape, dtype)
        if padding:
            weight = jnp.pad(weight, [(0, 0)] * (len(shape) - 1) + [(0, padding)])
        self.name, self.spec, self.axes = name, spec, axes
        self.weight = nnx.Param(weight, info=ParamInfo(axes, kind, num_inputs, padding))
        zeros = jnp.zeros(shape[num_inputs:], dtype)
        info = ParamInfo(axes[num_inputs:], Kind.vector)
        self.bias = nnx.Param(zeros, info=info) if bias else None

    def __call__(
        self,
        x: Float[Array, "..."],
        execution: Execution,
        call: CallContext = NO_CONTEXT,
    ) -> Float[Array, "..."]:
        """Return the layer's output for x [..., input dims], in x's dtype."""
        numerics = execution.numerics
        quantization = None if call.high_precision else numerics.quantization
        with part_scope(self.name):
            call = call.fold_in(zlib.crc32(self.name.encode()))
            if call.taps and call.taps.watched and quantization is not None:
                x_rounded = x.astype(numerics.compute_dtype)
                x_quantized = quantization.round_left(self.spec, x_rounded)
                call.taps.note_rounding(count_rounding(x_rounded, x_quantized))
            # The product gathers the weight and reduce-scatters its gradient.
            y = product(
                self.spec,
                x,
                self.weight[...],
                numerics.compute_dtype,
                placement=execution.weight_placement(self.axes),
                quantization=quantization,
                keys_BT=call.keys_BT,
            )
            if self.bias is None:
                return y
            return y + expand_to(self.bias[...], y.ndim).astype(y.dtype)
