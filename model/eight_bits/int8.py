"""Products in int8, forward and the gradient of the input, for TPUs.

Each row of the left operand and each column of the right one has a scale. The cotangent
is rounded at random, up or down by how near either is, so that rounding adds no bias;
what is drawn is a function of seed, step, position, layer and weight, on any mesh. The
gradient of the weight has operands of the compute dtype.

Weights are gathered in int8, once a pass, since its two products need other scales.

Sources: AQT's recipe as MaxText has it; for stochastic rounding Gupta et al.,
arXiv:1502.02551.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from model.eight_bits.quantization import Scaled, contract, largest, transposed
from model.gather import WHOLE, Parts

_MOST = 127.0
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def to_int8(
    x: jax.Array,
    dims: Sequence[int],
    parts: Parts = WHOLE,
    keys_BT: jax.Array | None = None,
) -> Scaled:
    """Round x to -127 .. 127 times a scale, and gather both.

    Args:
        x: a device's part of an array.
        dims: that one scale is for: those that a product contracts.
        parts: of x, if it is a weight.
        keys_BT: of each position of x[B, T, ...], to round at random; None: to the
            nearest.
    """
    inside = tuple(axis for dim, axes in parts.cut if dim in dims for axis in axes)
    scale = jnp.maximum(largest(x, tuple(dims), inside) / _MOST, _SMALLEST)
    x = x.astype(jnp.float32) / scale
    if keys_BT is None:
        x = jnp.round(x)
    else:
        draw = partial(jax.random.uniform, shape=x.shape[2:], dtype=x.dtype)
        x = jnp.floor(x + jax.vmap(jax.vmap(draw))(keys_BT))
    x = jnp.clip(x, -_MOST, _MOST)  # what is beyond has no defined int8
    outside = tuple((dim, axes) for dim, axes in parts.cut if dim not in dims)
    own = parts._replace(cut=outside, place=PartitionSpec())
    return Scaled(parts.gather(x.astype(jnp.int8)), own.gather(scale))


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def int8_product(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    compute: DTypeLike,
    parts: Parts,
    emulated: bool,
    keys_BT: jax.Array | None,
) -> jax.Array:
    """Multiply as `model.linear.product`, but for b's gradient in int8.

    `keys_BT` are of a's positions; None: the cotangent is rounded to the nearest.
    """
    return _int8_forward(spec, a, b, compute, parts, emulated, keys_BT)[0]


def _multiply(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    out: DTypeLike,
    parts: Parts,
    emulated: bool,
    keys_BT: jax.Array | None = None,
) -> jax.Array:
    operands, result = spec.split("->")
    left, right = operands.split(",")
    a_8 = to_int8(a, contracted(left, result), keys_BT=keys_BT)
    b_8 = to_int8(b, contracted(right, result), parts)
    y = contract(spec, a_8, b_8, jnp.int32, emulated).astype(jnp.float32)
    scale = _along(result, a_8.scale, left) * _along(result, b_8.scale, right)
    return (y * scale).astype(out)


def contracted(dims: str, result: str) -> list[int]:
    """Return which dims of an operand an einsum contracts."""
    return [i for i, dim in enumerate(dims) if dim not in result]


def _along(result: str, scale: jax.Array, dims: str) -> jax.Array:
    """Bring scales, whose contracted dims have size 1, to the dims of a result."""
    kept = [dim for dim in dims if dim in result]
    scale = jnp.squeeze(scale, contracted(dims, result))
    scale = jnp.transpose(scale, [kept.index(dim) for dim in result if dim in kept])
    missing = [i for i, dim in enumerate(result) if dim not in kept]
    return jnp.expand_dims(scale, missing)


def _int8_forward(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    compute: DTypeLike,
    parts: Parts,
    emulated: bool,
    keys_BT: jax.Array | None,
):
    out, a_rounded = a.dtype, a.astype(compute)
    y = _multiply(spec, a_rounded, b, out, parts, emulated)
    return y, (a_rounded, b, keys_BT, jnp.zeros((), out))


def _int8_backward(
    spec: str, compute: DTypeLike, parts: Parts, emulated: bool, residuals, dy
):
    a, b, keys_BT, like_a = residuals
    of_a, of_b = transposed(spec)
    da = _multiply(of_a, dy, b, like_a.dtype, parts, emulated, keys_BT)
    db = jnp.einsum(of_b, a, dy.astype(compute), preferred_element_type=b.dtype)
    return da, parts.scatter(db), None


int8_product.defvjp(_int8_forward, _int8_backward)
