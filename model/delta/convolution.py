"""A causal convolution over the positions of a document, for each channel.

Shapes: B batch, T time, E earlier positions (one less than taps), D channels of any
number of dims.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.linear import expand_to


def convolve(
    x_BTD: Float[Array, "B T *D"],
    earlier: Float[Array, "B E *D"],
    documents_BT: Int[Array, "B T"],
    taps: Float[Array, "*D taps"],
) -> Float[Array, "B T *D"]:
    """Return silu(convolution). The last tap multiplies a position's own input.

    `earlier` has the inputs before the first position, of document 0. Inputs of other
    documents count as zero.
    """
    T, num_earlier = x_BTD.shape[1], earlier.shape[1]
    inputs, documents = _prepend(earlier, x_BTD, documents_BT)
    y = jnp.zeros(x_BTD.shape, jnp.float32)
    for start in range(num_earlier + 1):
        part = slice(start, start + T)
        visible = _mask(inputs[:, part], documents[:, part] == documents_BT)
        tap = expand_to(taps[..., start].astype(jnp.float32), y.ndim)
        y = y + visible.astype(jnp.float32) * tap
    return jax.nn.silu(y).astype(x_BTD.dtype)


def last_inputs(
    x_BTD: Float[Array, "B T *D"],
    earlier: Float[Array, "B E *D"],
    documents_BT: Int[Array, "B T"],
) -> Float[Array, "B E *D"]:
    """Return what `convolve` needs as `earlier` for the positions after these."""
    inputs, documents = _prepend(earlier, x_BTD, documents_BT)
    last = slice(x_BTD.shape[1], None)
    return _mask(inputs[:, last], documents[:, last] == documents[:, -1:])


def _prepend(
    earlier: jax.Array, x: jax.Array, documents: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inputs = jnp.concatenate([earlier, x], axis=1)
    return inputs, jnp.pad(documents, [(0, 0), (earlier.shape[1], 0)])


def _mask(x: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return jnp.where(mask_BT.reshape(*mask_BT.shape, *[1] * (x.ndim - 2)), x, 0)
