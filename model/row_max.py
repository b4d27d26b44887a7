"""The largest value of each row, as XLA's CPU is fast at it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_NARROW = 32  # values of a row that XLA does not cut into windows


def row_max(x: Float[Array, "... S"]) -> Float[Array, "... 1"]:
    """Return the maximum over the last dim; a NaN is one.

    Halves of rows are compared, many values at once, until rows are narrow. By itself
    XLA's CPU compares the values of a row one by one, which took longer than a softmax'
    exponentials (docs/log.md).
    """
    while x.shape[-1] > _NARROW and x.shape[-1] % 2 == 0:
        left, right = jnp.split(x, 2, axis=-1)
        x = jnp.maximum(left, right)
    return jnp.max(x, axis=-1, keepdims=True)
