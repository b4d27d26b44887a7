"""Keys and values of what came before, for generation.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from model.attention import masks, xla
from model.attention.masks import Local


class KeysValues(NamedTuple):
    """Keys and values seen so far, [B, S, K, H] each, and how many of S are.

    A row begins at its `first` of them; None: at 0.
    """

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]
    length: Int[Array, "*L"]
    first_B: Int[Array, "*L B"] | None = None

    def append(
        self, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
    ) -> "KeysValues":
        """Write T more positions behind the ones that are there."""
        at = (0, self.length, 0, 0)
        return KeysValues(
            jax.lax.dynamic_update_slice(self.keys, k_BTKH, at),
            jax.lax.dynamic_update_slice(self.values, v_BTKH, at),
            self.length + k_BTKH.shape[1],
            self.first_B,
        )


def cached_attention(
    q_BTNH: Float[Array, "B T N H"],
    cache: KeysValues,
    compute: DTypeLike,
    trained_length: int | None = None,
    *,
    window: int | None = None,
    local: Local | None = None,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend from the newest T positions of a cache to what it holds before them.

    None looks further back than rows were long in training. The window and what comes
    after it are as in `attention`.
    """
    T, S = q_BTNH.shape[1], cache.keys.shape[1]
    newest_T = cache.length - T + jnp.arange(T)
    behind_TS = newest_T[:, None] - jnp.arange(S)[None]
    seen_TS = behind_TS >= 0
    for reach in (trained_length, masks.reach(window, local, S)):
        if reach is not None:
            seen_TS &= behind_TS < reach
    seen_BTS = seen_TS[None]
    if cache.first_B is not None:
        seen_BTS &= jnp.arange(S) >= cache.first_B[:, None, None]
    keys, values = cache.keys, cache.values
    return xla.attend(q_BTNH, keys, values, seen_BTS, compute, soft_cap, sinks_N)
