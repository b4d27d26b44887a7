"""Which keys a query sees: those before it in its document, in a window if it has one.

Shapes: B batch, T query time, S key time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Local(NamedTuple):
    """Whether a layer is local, which is known only as it runs; `times` of `of` are."""

    flag: Bool[Array, ""]
    times: int
    of: int


def reach(
    window: int | None, local: Local | None, length: int
) -> Int[Array, ""] | int | None:
    """Return how many keys a query sees in a layer that may be a local one."""
    if window is None or local is None:
        return window
    return jnp.where(local.flag, window, length)


def causal(
    T: int,
    segment_ids_BS: Int[Array, "B S"] | None,
    window: Int[Array, ""] | int | None = None,
) -> Bool[Array, "_ T S"]:
    """Tell for each query which keys it sees: those before it in its document.

    With a window it is itself and the window - 1 before it. Queries are the last T of S
    positions; without documents S is T.
    """
    S = T if segment_ids_BS is None else segment_ids_BS.shape[1]
    causal_BTS = jnp.tril(jnp.ones((T, S), bool), S - T)[None]
    if window is not None:
        behind_TS = jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None]
        causal_BTS &= (behind_TS < window)[None]
    if segment_ids_BS is None:
        return causal_BTS
    return causal_BTS & (segment_ids_BS[:, S - T :, None] == segment_ids_BS[:, None])
