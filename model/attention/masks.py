"""Causal masks within documents and, optionally, a window.

Shapes: B batch, T query time, S key time.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def layer_window(
    window: int | None, local_flag: Bool[Array, ""] | None, length: int
) -> Int[Array, ""] | int | None:
    """Return this layer's window in keys; None if a query sees all earlier keys.

    If there is a `local_flag`, it decides at run time whether the window applies.
    """
    if window is None or local_flag is None:
        return window
    return jnp.where(local_flag, window, length)


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
