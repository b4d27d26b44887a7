"""Detect updates that overflow float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def num_overflows(
    new: Any, old: Any, bound: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return how many entries have a finite `bound` before an update, but not after it.

    `new` are the values to be written, before they are rounded. `bound` maps an
    entry to a value that must be finite, such as its square.
    """

    def count(new: jax.Array, old: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return jnp.float32(0)
        overflows = jnp.isfinite(bound(old)) & ~jnp.isfinite(bound(new))
        return jnp.sum(overflows, dtype=jnp.float32)

    return jnp.asarray(optax.tree.sum(jax.tree.map(count, new, old)))
