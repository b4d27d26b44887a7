"""Products in int8 for TPUs: the forward product and the gradient of the input.

Each row of the left operand and each column of the right operand has a scale. The
cotangent is rounded stochastically: the nearer of two integers is the more likely, so
that rounding adds no bias. The random numbers depend on seed, step, position, layer and
weight, not on the mesh. The weight's gradient is a product in the compute dtype.

The forward and the backward pass each round a weight and gather it in int8, because
their products contract different dims and need different scales.

Sources: AQT's recipe as in MaxText; stochastic rounding: Gupta et al.,
arXiv:1502.02551.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from model.gather import UNSHARDED, WeightPlacement
from model.parts.eight_bits.quantization import contract, max_abs
from model.products import ProductOptions, Quantized, gradient_specs

_MAX_VALUE = 127.0
_MIN_SCALE = float(jnp.finfo(jnp.float32).tiny)


def to_int8(
    x: jax.Array,
    dims: Sequence[int],
    placement: WeightPlacement = UNSHARDED,
    keys_BT: jax.Array | None = None,
) -> Quantized:
    """Round x / scale to -127 .. 127, and gather the values and the scale.

    Values along `dims`, which the product contracts, share a scale. If x is a weight,
    `placement` is its sharding. Values are rounded to the nearest integer. With
    `keys_BT`, values of x[B, T, ...] are rounded stochastically instead.
    """
    contracted_axes = tuple(
        axis for dim, axes in placement.sharded_dims if dim in dims for axis in axes
    )
    largest = max_abs(x, tuple(dims), contracted_axes)
    scale = jnp.maximum(largest / _MAX_VALUE, _MIN_SCALE)
    x = x.astype(jnp.float32) / scale
    if keys_BT is None:
        x = jnp.round(x)
    else:
        draw = partial(jax.random.uniform, shape=x.shape[2:], dtype=x.dtype)
        x = jnp.floor(x + jax.vmap(jax.vmap(draw))(keys_BT))
    # Values outside the range have no defined conversion to int8.
    x = jnp.clip(x, -_MAX_VALUE, _MAX_VALUE)
    scale_placement = placement.without_dims(dims)
    scale_placement = scale_placement._replace(automatic_spec=PartitionSpec())
    return Quantized(
        placement.gather(x.astype(jnp.int8)), scale_placement.gather(scale)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def int8_product(
    options: ProductOptions, a: jax.Array, b: jax.Array, keys_BT: jax.Array | None
) -> jax.Array:
    """Multiply like `model.products.product`, in int8 except for the gradient of b."""
    return _int8_forward(options, a, b, keys_BT)[0]


def _multiply(
    options: ProductOptions,
    a: jax.Array,
    b: jax.Array,
    out: DTypeLike,
    keys_BT: jax.Array | None = None,
) -> jax.Array:
    operands, result = options.spec.split("->")
    a_dims, b_dims = operands.split(",")
    a_8 = to_int8(a, contracted_dims(a_dims, result), keys_BT=keys_BT)
    b_8 = to_int8(b, contracted_dims(b_dims, result), options.placement)
    y = contract(options.spec, a_8, b_8, jnp.int32, options.emulated)
    scale = _expand(a_8.scale, a_dims, result) * _expand(b_8.scale, b_dims, result)
    return (y.astype(jnp.float32) * scale).astype(out)


def contracted_dims(dims: str, result: str) -> list[int]:
    """Return the dims of an operand that an einsum contracts."""
    return [i for i, dim in enumerate(dims) if dim not in result]


def _expand(scale: jax.Array, dims: str, result: str) -> jax.Array:
    """Return an operand's scales in a shape that broadcasts to the result."""
    shared = [dim for dim in dims if dim in result]
    scale = jnp.squeeze(scale, contracted_dims(dims, result))
    scale = jnp.transpose(scale, [shared.index(dim) for dim in result if dim in shared])
    missing = [i for i, dim in enumerate(result) if dim not in shared]
    return jnp.expand_dims(scale, missing)


def _int8_forward(
    options: ProductOptions, a: jax.Array, b: jax.Array, keys_BT: jax.Array | None
):
    a_rounded = a.astype(options.compute)
    y = _multiply(options, a_rounded, b, a.dtype)
    return y, (a_rounded, b, keys_BT, jnp.zeros((), a.dtype))


def _int8_backward(options: ProductOptions, residuals, dy: jax.Array):
    a, b, keys_BT, like_a = residuals
    spec_da, spec_db = gradient_specs(options.spec)
    da = _multiply(options._replace(spec=spec_da), dy, b, like_a.dtype, keys_BT)
    dy = dy.astype(options.compute)
    db = jnp.einsum(spec_db, a, dy, preferred_element_type=b.dtype)
    return da, options.placement.reduce_scatter(db), None


int8_product.defvjp(_int8_forward, _int8_backward)
