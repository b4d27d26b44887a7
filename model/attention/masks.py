"""Masks: a query sees earlier keys of its document, within its window if it has one.

Shapes: B batch, T query time, S key time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Local(NamedTuple):
    """Whether a layer attends in a window, if only the running program knows that.

    flag: true in a local layer.
    times: the number of local layers among the layers of the scan.
    total: the number of layers of the scan.
    """

    flag: Bool[Array, ""]
    times: int
    total: int


def reach(
    window: int | None, local: Local | None, length: int
) -> Int[Array, ""] | int | None:
    """Return how many keys a query of this layer sees; None means all of them."""
    if window is None or local is None:
        return window
    return jnp.where(local.flag, window, length)


def causal(
    T: int,
    segment_ids_BS: Int[Array, "B S"] | None,
    window: Int[Array, ""] | int | None = None,
) -> Bool[Array, "_ T S"]:
    """Return true for each pair of a query and a key that the query sees.

    Args:
        T: the number of queries. They are the last T of S positions.
        segment_ids_BS: document of each position. None means one document of T
            positions.
        window: the number of keys that a query sees at most, itself included.
    """
    S = T if segment_ids_BS is None else segment_ids_BS.shape[1]
    causal_BTS = jnp.tril(jnp.ones((T, S), bool), S - T)[None]
    if window is not None:
        distance_TS = jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None]
        causal_BTS &= (distance_TS < window)[None]
    if segment_ids_BS is None:
        return causal_BTS
    return causal_BTS & (segment_ids_BS[:, S - T :, None] == segment_ids_BS[:, None])
