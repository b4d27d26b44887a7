"""The inverse of a unit lower triangular matrix, with its own derivative."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_multiply = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def unit_lower_inverse(
    strict_lower: Float[Array, "*dims C C"],
) -> Float[Array, "*dims C C"]:
    """Return (I + L)^-1 for strictly lower triangular float32 L. C is a power of 2.

    The inverses of diagonal blocks of size s give those of blocks of size 2 s:

        [A 0; M B]^-1 = [A^-1 0; -B^-1 M A^-1  B^-1]

    This stays accurate if keys are similar or equal. A sum of powers of L would
    overflow there, because the powers are much larger than the inverse.
    """
    C = strict_lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(C), strict_lower.shape)
    size = 1
    while size < C:
        block = np.arange(C) // size
        # M has its rows and columns in the same block of size 2 s.
        is_pair = block[:, None] // 2 == block // 2
        is_below = jnp.array(is_pair & (block[:, None] > block))
        below = jnp.where(jnp.broadcast_to(is_below, inverse.shape), strict_lower, 0)
        if size > 1:
            below = _multiply(_multiply(inverse, below), inverse)
        inverse = inverse - below
        size = 2 * size
    return inverse


def _forward(strict_lower: jax.Array):
    inverse = unit_lower_inverse(strict_lower)
    return inverse, inverse


def _backward(inverse: jax.Array, cotangent: jax.Array):
    gradient = _multiply(_multiply(inverse.mT, cotangent), inverse.mT)
    return (-jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_forward, _backward)
