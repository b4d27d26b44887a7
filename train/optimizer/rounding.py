"""Stochastic rounding: up or down by how near either is, so that it adds no bias.

Rounding to the nearest forgets every change below half a step of the format: a mean
that decays by 0.1 % never falls in bfloat16, whose steps are 0.4 to 0.8 %, and a weight
whose update is smaller never moves. Rounded at random, what is kept has the right
value on average.

What is drawn is a function of a key and of an entry's place in the whole array: the
same on any mesh, and after a resume. Bits are mixed from the place, not drawn by
jax.random, whose threefry takes fifty times as long on a CPU (docs/log.md).

Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551.
"""

import math
import zlib

import jax
import jax.numpy as jnp


def key_of_step(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the uint32 from which a step's bits are mixed."""
    return jax.random.bits(jax.random.fold_in(jax.random.key(seed), step))


def random_bits(
    key: jax.Array, name: str, shape: tuple[int, ...], first: jax.Array | int = 0
) -> jax.Array:
    """Return uint32 of a shape for the array of a name, 16 of them as good as random.

    Args:
        key: of the step.
        name: of the array in the state; others get other bits.
        shape: of the array, or of a part of it.
        first: where along the first dim that part begins.
    """
    name_key = mixed(key ^ jnp.uint32(zlib.crc32(name.encode())))
    return mixed(mixed(places(shape, first) ^ name_key) + name_key)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 at random; what is not finite stays what it is.

    A bfloat16 is the upper half of a float32: what is added to the lower half carries
    over as often as that half says.
    """
    half = jnp.uint32(0xFFFF)
    raised = (x.view(jnp.uint32) + (bits & half)) & ~half
    return jnp.where(jnp.isfinite(x), raised.view(jnp.float32), x).astype(jnp.bfloat16)


def places(shape: tuple[int, ...], first: jax.Array | int = 0) -> jax.Array:
    """Return uint32 of a shape: all different, where there are at most 2**32.

    Args:
        shape: of an array, or of a part of it.
        first: where along the first dim that part begins.
    """
    index, stride = jnp.zeros(shape, jnp.uint32), 0x9E3779B9  # odd
    rows = math.prod(shape[1:]) * stride % 2**32
    if isinstance(first, jax.Array):
        index += jnp.uint32(rows) * first.astype(jnp.uint32)
    for dim, size in reversed(list(enumerate(shape))):
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        stride = stride * size % 2**32
    return index


def mixed(x: jax.Array) -> jax.Array:
    """Map each uint32 to another, one to one, so that near ones end up far apart.

    Source: lowbias32 of https://nullprogram.com/blog/2018/07/31/.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
