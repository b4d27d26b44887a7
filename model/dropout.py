"""Dropout: what training leaves out at random, so that no unit relies on another.

Which elements those are is a function of seed, step, layer and place in the layer, row
of the global batch and position: the same on any mesh, in any microbatch, and after a
restart. Where no keys are given, in evaluation and sampling, nothing is left out.

Source: Srivastava et al., Dropout, JMLR 15 (2014), in its inverted form.
"""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import Execution


def drop(
    x: Float[Array, "B T *dims"], rate: float, place: str, how: Execution
) -> Float[Array, "B T *dims"]:
    """Set a part of the elements to zero and scale the others up to the same mean.

    Args:
        x: rows of positions.
        rate: the part, below 1.
        place: in the layer; what is left out elsewhere is independent.
        how: with keys of the positions, or without.
    """
    if not rate:
        return x
    keys_BT = how.drawing(zlib.crc32(place.encode())).keys_BT
    if keys_BT is None:
        return x
    draw = partial(jax.random.bernoulli, p=1 - rate, shape=x.shape[2:])
    return jnp.where(jax.vmap(jax.vmap(draw))(keys_BT), x / (1 - rate), 0)
