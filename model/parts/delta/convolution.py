"""A causal convolution over the positions of a document, for each channel.

Shapes: B batch, E earlier positions (one less than taps), T time, S = E + T positions,
D channels of any number of dims.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.products import expand_to


def convolve(
    x_BSD: Float[Array, "B S *D"],
    ids_BS: Int[Array, "B S"],
    taps: Float[Array, "*D taps"],
) -> Float[Array, "B T *D"]:
    """Return silu(convolution) at the last T positions.

    The last tap multiplies a position's own input. Inputs of documents with another id
    count as zero.
    """
    num_taps = taps.shape[-1]
    y = jnp.float32(0)
    T = x_BSD.shape[1] - num_taps + 1
    for tap in range(num_taps):
        x_BTD, ids_BT = (array[:, tap : tap + T] for array in (x_BSD, ids_BS))
        is_visible = (ids_BT == ids_BS[:, -T:]).reshape(-1, T, *[1] * (x_BTD.ndim - 2))
        weights = expand_to(taps[..., tap].astype(jnp.float32), x_BTD.ndim)
        y += jnp.where(is_visible, x_BTD, 0).astype(jnp.float32) * weights
    return jax.nn.silu(y).astype(x_BSD.dtype)
