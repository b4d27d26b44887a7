"""Attention by two products and a softmax, on any platform.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, G = N/K,
H head dim.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.linear import product


def mask(T: int, segment_ids_BT: Int[Array, "B T"] | None) -> Bool[Array, "_ T T"]:
    """Tell for each query which keys it sees: those before it in its document."""
    causal_BTS = jnp.tril(jnp.ones((T, T), bool))[None]
    if segment_ids_BT is None:
        return causal_BTS
    return causal_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
) -> Float[Array, "B T N H"]:
    """Attend where the mask is true, with scores [B, K, G, T, S] in memory."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    scores_BKGTS = product("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, compute)
    scores_BKGTS = scores_BKGTS.astype(jnp.float32)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTNH.dtype)
    o_BTKGH = product("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH, compute)
    return o_BTKGH.reshape(B, T, N, H)
