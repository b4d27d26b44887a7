"""Stochastic rounding: the probability of rounding up equals the remainder.

Rounding to nearest loses every change below half the distance between neighbouring
values. In bfloat16, this distance is 0.4 to 0.8 %, so a mean that decays by 0.1 % in
each step never falls, and a weight with such small updates never moves. Stochastic
rounding is exact on average.

The random bits are a function of a key, of the array's name in its layer, of the
layer's number and of the entry's index in the layer's global array. So they are the
same on any mesh, after a resume, and for any grouping of layers. They are hashed,
because threefry of jax.random takes fifty times as long on a CPU (docs/log).

Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551.
"""

import math
import zlib

import jax
import jax.numpy as jnp


def key_of_step(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the uint32 from which the bits of a step are hashed."""
    return jax.random.bits(jax.random.fold_in(jax.random.key(seed), step))


def random_bits(
    key: jax.Array,
    name: str,
    shape: tuple[int, ...],
    start: jax.Array | int = 0,
    step: int = 1,
) -> jax.Array:
    """Return a pseudorandom uint32 for each entry of an array, or of a part of it.

    Args:
        key: the key of the step.
        name: the name of the array in the state. Each name gets different bits.
        shape: the shape of the array, or of a part of it.
        start: the index along the first dim at which the part begins.
        step: the difference of the indices of neighbours along the first dim.
    """
    array_key = hash_bits(key ^ jnp.uint32(zlib.crc32(name.encode())))
    return hash_bits(hash_bits(entry_ids(shape, start, step) ^ array_key) + array_key)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically; infinities and NaN stay.

    A bfloat16 is the upper half of a float32. Adding 16 random bits to the lower half
    carries into the upper half with probability (lower half) / 2**16.
    """
    lower_half = jnp.uint32(0xFFFF)
    rounded = (x.view(jnp.uint32) + (bits & lower_half)) & ~lower_half
    return jnp.where(jnp.isfinite(x), rounded.view(jnp.float32), x).astype(jnp.bfloat16)


def entry_ids(
    shape: tuple[int, ...], start: jax.Array | int = 0, step: int = 1
) -> jax.Array:
    """Return a uint32 for each entry of an array, or of a part as in `random_bits`.

    The ids are distinct for up to 2**32 entries.
    """
    ids = jnp.zeros(shape, jnp.uint32)
    stride = 0x9E3779B9  # An odd stride gives distinct ids.
    row_stride = math.prod(shape[1:]) * stride % 2**32
    if not isinstance(start, int) or start:
        ids += jnp.uint32(row_stride) * jnp.asarray(start, jnp.uint32)
    for dim, size in reversed(list(enumerate(shape))):
        dim_stride = stride if dim else stride * step % 2**32
        ids += jnp.uint32(dim_stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        stride = stride * size % 2**32
    return ids


def hash_bits(x: jax.Array) -> jax.Array:
    """Map uint32 to uint32, one to one, so that near numbers end up far apart.

    Source: lowbias32 of https://nullprogram.com/blog/2018/07/31/.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
