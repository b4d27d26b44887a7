"""Dropout: set random elements to zero in training.

The dropped elements depend only on seed, step, layer, site in the layer, row of the
global batch and position, so they are the same on every mesh and after a restart.
Without keys, in evaluation and sampling, nothing is dropped.

Source: Srivastava et al., Dropout, JMLR 15 (2014), in its inverted form.
"""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import CallContext


def drop(
    x: Float[Array, "B T *dims"], rate: float, site: str, call: CallContext
) -> Float[Array, "B T *dims"]:
    """Return x with a fraction set to zero, and the rest scaled to keep the mean.

    Sites, which are places in a layer, drop independently of each other.
    """
    if not rate:
        return x
    keys_BT = call.fold_in(zlib.crc32(site.encode())).keys_BT
    if keys_BT is None:
        return x
    draw = partial(jax.random.bernoulli, p=1 - rate, shape=x.shape[2:])
    return jnp.where(jax.vmap(jax.vmap(draw))(keys_BT), x / (1 - rate), 0)
