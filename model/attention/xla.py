"""Attention by two products and a softmax, on any platform.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, G = N/K,
H head dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.attention.ring import Documents, Result
from model.linear import product

MULTIPLE = 1  # positions of a chunk
_MASKED = -1e30


Drop = Callable[[Array], Array]  # of weights [B, T, K, G, S]


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


def mask(
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


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    drop: Drop | None = None,
) -> Float[Array, "B T N H"]:
    """Attend where the mask is true, with scores [B, K, G, T, S] in memory.

    A sink is one more score, of a value that is zero: it takes its part of the weights
    from the sum over all others.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    scores_BKGTS = product("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, compute)
    scores_BKGTS = scores_BKGTS.astype(jnp.float32)
    scores_BKGTS = _capped(scores_BKGTS, soft_cap)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTNH.dtype)
    if drop is not None:
        dropped_BTKGS = drop(jnp.moveaxis(weights_BKGTS, 3, 1))
        weights_BKGTS = jnp.moveaxis(dropped_BTKGS, 1, 3)
    o_BTKGH = product("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH, compute)
    if sinks_N is not None:
        lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
        sinks_BKGT = sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1)
        kept_BTKG = jnp.moveaxis(jax.nn.sigmoid(lse_BKGT - sinks_BKGT), -1, 1)
        o_BTKGH = o_BTKGH * kept_BTKG[..., None].astype(o_BTKGH.dtype)
    return o_BTKGH.reshape(B, T, N, H)


def _capped(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def forward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Run a step of a ring (model/attention/ring.py); the result is float32."""
    scores_BKGTS = _scores(q_BNTH, k_BKSH, documents, causal, soft_cap)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    o_BKGTH, _ = _weighted(scores_BKGTS, v_BKSH, lse_BKGT)
    return o_BKGTH.reshape(q_BNTH.shape), lse_BKGT.reshape(q_BNTH.shape[:3])


def backward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    result: Result,
    do_BNTH: Float[Array, "B N T H"],
    soft_cap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Run a step of a ring backward.

    With weights P = exp(scores - lse), of which the whole result is o = sum(P v) over
    all keys, the scores' gradient is P (do v - do o): that of sum(P v) with cotangent
    do, and of sum(P) with cotangent -do o.
    """
    B, N, T, _ = q_BNTH.shape
    K = k_BKSH.shape[1]
    lse_BKGT = result.lse_BNT.reshape(B, K, N // K, T)
    do_BNTH = do_BNTH.astype(jnp.float32)

    def sums(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return _weighted(_scores(q, k, documents, causal, soft_cap), v, lse_BKGT)

    (o_BKGTH, _), transpose = jax.vjp(sums, q_BNTH, k_BKSH, v_BKSH)
    dot_BNT = jnp.sum(do_BNTH * result.o_BNTH.astype(jnp.float32), axis=-1)
    return transpose((do_BNTH.reshape(o_BKGTH.shape), -dot_BNT.reshape(lse_BKGT.shape)))


def _scores(
    q_BNTH: Array,
    k_BKSH: Array,
    documents: Documents,
    causal: bool,
    soft_cap: float | None,
) -> Array:
    """Return float32 scores [B, K, G, T, S] of scaled queries."""
    (B, N, T, H), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
    q_BKGTH = q_BNTH.astype(jnp.float32).reshape(B, K, N // K, T, H)
    scores_BKGTS = product("bkgth,bksh->bkgts", q_BKGTH, k_BKSH, q_BNTH.dtype)
    scores_BKGTS = _capped(scores_BKGTS, soft_cap)
    mask_BTS = jnp.ones((1, T, S), bool)
    if documents is not None:
        mask_BTS = documents[0][:, :, None] == documents[1][:, None]
    if causal:
        mask_BTS &= jnp.tril(jnp.ones((T, S), bool))[None]
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)


def _weighted(
    scores_BKGTS: Array, v_BKSH: Array, lse_BKGT: Array
) -> tuple[Array, Array]:
    """Return the sums of values by exp(scores - lse), and of these weights."""
    weights_BKGTS = jnp.exp(scores_BKGTS - lse_BKGT[..., None])
    o_BKGTH = product("bkgts,bksh->bkgth", weights_BKGTS, v_BKSH, v_BKSH.dtype)
    return o_BKGTH, jnp.sum(weights_BKGTS, axis=-1)
