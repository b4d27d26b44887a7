"""Causal masks within documents and, optionally, a window.

Shapes: B batch, T query time, S key time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class LocalFlag(NamedTuple):
    """Whether the current layer of a scan attends in a window, decided at run time.

    The value is true in `num_local` of the scan's `num_layers` layers.
    """

    value: Bool[Array, ""]
    num_local: int
    num_layers: int


def layer_window(
    window: int | None, local_flag: LocalFlag | None, length: int
) -> Int[Array, ""] | int | None:
    """Return this layer's window in keys; None if a query sees all earlier keys."""
    if window is None or local_flag is None:
        return window
    return jnp.where(local_flag.value, window, length)


def causal_mask(
    T: int,
    segment_ids_BS: Int[Array, "B S"] | None,
    window: Int[Array, ""] | int | None = None,
) -> Bool[Array, "_ T S"]:
    """Return the mask that is true where a query sees a key.

    Queries are the last T of S positions. Without segment ids, S is T, and each row is
    one document. A query sees at most `window` keys, its own included.
    """
    S = T if segment_ids_BS is None else segment_ids_BS.shape[1]
    causal_BTS = jnp.tril(jnp.ones((T, S), bool), S - T)[None]
    if window is not None:
        distance_TS = jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None]
        causal_BTS &= (distance_TS < window)[None]
    if segment_ids_BS is None:
        return causal_BTS
    return causal_BTS & (segment_ids_BS[:, S - T :, None] == segment_ids_BS[:, None])
