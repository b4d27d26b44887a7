"""The inverse of a unit lower triangular matrix, with its own derivative."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


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
    inverse, size = jnp.broadcast_to(jnp.eye(C), strict_lower.shape), 1
    while size < C:
        block = np.arange(C) // size
        # An element of M has a row and a column in one block of size 2 s, but not s.
        in_pair = block[:, None] // 2 == block // 2
        is_below = in_pair & (block[:, None] > block)
        mask = jnp.broadcast_to(is_below, strict_lower.shape)
        below = jnp.where(mask, strict_lower, 0)
        if size > 1:
            below = _multiply(_multiply(inverse, below), inverse)
        inverse, size = inverse - below, 2 * size
    return inverse


def _forward(strict_lower: jax.Array):
    inverse = unit_lower_inverse(strict_lower)
    return inverse, inverse


def _backward(inverse: jax.Array, dinverse: jax.Array):
    transposed = inverse.mT
    gradient = _multiply(_multiply(transposed, dinverse), transposed)
    return (-jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_forward, _backward)
