"""Attention by two products and a softmax, on any platform.

Queries of the heads that share keys are rows of one product, and the backward pass is
written out, with the flash kernels' sum over the head instead of one over all keys: on
XLA's CPU five times as fast as what it makes of five dims and of differentiating the
softmax (docs/log.md).

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
M = T N/K queries that share keys, head by head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.attention.ring import Documents, Result
from model.linear import einsum
from model.remat import named
from model.row_max import row_max

MULTIPLE = 1  # positions of a chunk
_MASKED = -1e30
# Keys behind a block of queries are left out (docs/log.md).
_BLOCK, _MOST_BLOCKS = 128, 4  # positions of one, at least

Drop = Callable[[Array], Array]  # of weights [B, T, K, N/K, S]


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    drop: Drop | None = None,
    *,
    causal: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend where the mask is true, with weights [B, N, T, S] in memory.

    A sink is one more score, of a value that is zero: it takes its part of the weights
    from the sum over all others. With `causal` the mask is one of masks.causal, queries
    being the last T of S positions: a block of them meets no key behind its last.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BNTH = jnp.swapaxes(q_BTNH * H**-0.5, 1, 2)
    kept_BTKGS = None
    if drop is not None:
        kept_BTKGS = drop(jnp.ones((B, T, K, N // K, S), compute))
    C = T // _num_blocks(T) if causal else T
    blocks = []
    for start in range(0, T, C):
        block, keys = slice(start, start + C), slice(S - T + start + C)
        kept = None if kept_BTKGS is None else kept_BTKGS[:, block, ..., keys]
        operands = q_BNTH[:, :, block], k_BSKH[:, keys], v_BSKH[:, keys]
        more = mask_BTS[:, block, keys], kept, compute, soft_cap
        blocks.append(_attend_block(*operands, *more))
    o_BNTH, lse_BNT = (jnp.concatenate(x, axis=2) for x in zip(*blocks, strict=True))
    o_BTNH = jnp.swapaxes(o_BNTH, 1, 2)
    if sinks_N is None:
        return o_BTNH
    kept_BNT = jax.nn.sigmoid(lse_BNT - sinks_N.astype(jnp.float32)[None, :, None])
    return o_BTNH * jnp.swapaxes(kept_BNT, 1, 2)[..., None].astype(o_BTNH.dtype)


def _attend_block(
    q_BNTH: Float[Array, "B N T H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    kept_BTKGS: Float[Array, "B T K N/K S"] | None,
    compute: DTypeLike,
    soft_cap: float | None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Attend from a block of scaled queries; return log-sum-exps too."""
    B, N, T, H = q_BNTH.shape
    S, K = k_BSKH.shape[1:3]
    kept_BKMS = None
    if kept_BTKGS is not None:
        kept_BKMS = jnp.moveaxis(kept_BTKGS, 1, 3).reshape(B, K, -1, S)
    q_BKMH, mask_BMS = q_BNTH.reshape(B, K, -1, H), _of_groups(mask_BTS, N // K)
    operands = q_BKMH, k_BSKH, v_BSKH, mask_BMS, kept_BKMS
    result: Any = _attend(*operands, compute, soft_cap)
    o_BKMH, lse_BKM = result
    return o_BKMH.reshape(q_BNTH.shape), lse_BKM.reshape(B, N, T)


def _num_blocks(T: int) -> int:
    """Return into how many equal blocks T queries are cut."""
    fitting = [n for n in range(1, _MOST_BLOCKS + 1) if T % n == 0 and n * _BLOCK <= T]
    return max(fitting, default=1)


def forward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Run a step of a ring (model/attention/ring.py); the result is float32."""
    q_BKMH, k_BSKH, v_BSKH, mask_BMS = _operands(
        q_BNTH, k_BKSH, v_BKSH, documents, causal
    )
    scores_BKMS = _scores(q_BKMH, k_BSKH, q_BNTH.dtype, soft_cap)
    weights_BKMS, lse_BKM = _softmax(_masked(scores_BKMS, mask_BMS))
    o_BKMH = einsum("bkms,bskh->bkmh", weights_BKMS, v_BSKH, v_BKSH.dtype, jnp.float32)
    return o_BKMH.reshape(q_BNTH.shape), lse_BKM.reshape(q_BNTH.shape[:3])


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
    """Run a step of a ring backward; the gradients are float32."""
    q_BKMH, k_BSKH, v_BSKH, mask_BMS = _operands(
        q_BNTH, k_BKSH, v_BKSH, documents, causal
    )
    compute, shape = q_BNTH.dtype, q_BKMH.shape
    scores_BKMS = _scores(q_BKMH, k_BSKH, compute, soft_cap)
    slope_BKMS = _slope(scores_BKMS, soft_cap)
    lse_BKM1 = result.lse_BNT.reshape(*shape[:3], 1)
    weights_BKMS = jnp.exp(_masked(scores_BKMS, mask_BMS) - lse_BKM1)
    o_BKMH, do_BKMH = result.o_BNTH.reshape(shape), do_BNTH.reshape(shape)
    dot_BKM = _dot(do_BKMH, o_BKMH)
    kept = q_BKMH, k_BSKH, v_BSKH, weights_BKMS.astype(compute)
    grads = _gradients(*kept, do_BKMH, dot_BKM, compute, None, slope_BKMS)
    dq_BKMH, dk_BSKH, dv_BSKH = grads
    dk_BKSH, dv_BKSH = jnp.swapaxes(dk_BSKH, 1, 2), jnp.swapaxes(dv_BSKH, 1, 2)
    return dq_BKMH.reshape(q_BNTH.shape), dk_BKSH, dv_BKSH


def _operands(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    documents: Documents,
    causal: bool,
) -> tuple[Array, Array, Array, Array]:
    """Return what `_attend` takes of a ring's operands."""
    (B, N, T, H), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
    mask_BTS = jnp.ones((1, T, S), bool)
    if documents is not None:
        mask_BTS = documents[0][:, :, None] == documents[1][:, None]
    if causal:
        mask_BTS &= jnp.tril(jnp.ones((T, S), bool))[None]
    q_BKMH, mask_BMS = q_BNTH.reshape(B, K, -1, H), _of_groups(mask_BTS, N // K)
    return q_BKMH, jnp.swapaxes(k_BKSH, 1, 2), jnp.swapaxes(v_BKSH, 1, 2), mask_BMS


def _of_groups(mask_BTS: Bool[Array, "_ T S"], heads: int) -> Bool[Array, "_ M S"]:
    """Repeat a mask for each of the heads that share keys."""
    return jnp.tile(mask_BTS, (1, heads, 1))


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    q_BKMH: Float[Array, "B K M H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BMS: Bool[Array, "_ M S"],
    factors_BKMS: Float[Array, "B K M S"] | None,
    compute: DTypeLike,
    soft_cap: float | None,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]:
    """Attend with scaled queries; the result has their dtype, lse is float32.

    Weights are multiplied by the factors, which are constants.
    """
    operands = q_BKMH, k_BSKH, v_BSKH, mask_BMS, factors_BKMS
    return _attend_forward(*operands, compute, soft_cap)[0]


def _attend_forward(q_BKMH, k_BSKH, v_BSKH, mask_BMS, factors_BKMS, compute, soft_cap):
    scores_BKMS = _scores(q_BKMH, k_BSKH, compute, soft_cap)
    weights_BKMS, lse_BKM = _softmax(_masked(scores_BKMS, mask_BMS))
    weights_BKMS = weights_BKMS.astype(compute)
    used_BKMS = _times(weights_BKMS, factors_BKMS)
    o_BKMH = einsum("bkms,bskh->bkmh", used_BKMS, v_BSKH, compute, q_BKMH.dtype)
    slope_BKMS = _slope(scores_BKMS, soft_cap)
    kept = q_BKMH, k_BSKH, v_BSKH, weights_BKMS
    o_BKMH, lse_BKM = named(o_BKMH, "attention"), named(lse_BKM, "attention")
    return (o_BKMH, lse_BKM), (kept, o_BKMH, factors_BKMS, slope_BKMS)


def _attend_backward(compute, soft_cap, residuals, cotangents):
    (q_BKMH, k_BSKH, v_BSKH, weights_BKMS), o_BKMH, *how = residuals
    do_BKMH, dlse_BKM = cotangents
    dot_BKM = _dot(do_BKMH, o_BKMH) - dlse_BKM
    operands = q_BKMH, k_BSKH, v_BSKH
    grads = _gradients(*operands, weights_BKMS, do_BKMH, dot_BKM, compute, *how)
    grads = (g.astype(x.dtype) for g, x in zip(grads, operands, strict=True))
    return *grads, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(
    q_BKMH: Array, k_BSKH: Array, compute: DTypeLike, soft_cap: float | None
) -> Float[Array, "B K M S"]:
    scores_BKMS = einsum("bkmh,bskh->bkms", q_BKMH, k_BSKH, compute, jnp.float32)
    if soft_cap is None:
        return scores_BKMS
    return soft_cap * jnp.tanh(scores_BKMS / soft_cap)


def _slope(capped_BKMS: Array, soft_cap: float | None) -> Array | None:
    """Return the derivative of capped scores by the uncapped ones."""
    return None if soft_cap is None else 1 - jnp.square(capped_BKMS / soft_cap)


def _masked(scores_BKMS: Array, mask_BMS: Array) -> Array:
    return jnp.where(mask_BMS[:, None], scores_BKMS, _MASKED)


def _softmax(scores_BKMS: Array) -> tuple[Array, Array]:
    """Return the weights, and the log-sum-exp of the scores."""
    highest_BKM1 = row_max(scores_BKMS)
    weights_BKMS = jnp.exp(scores_BKMS - highest_BKM1)
    sum_BKM1 = jnp.sum(weights_BKMS, axis=-1, keepdims=True)
    lse_BKM1 = highest_BKM1 + jnp.log(sum_BKM1)
    return weights_BKMS / sum_BKM1, lse_BKM1[..., 0]


def _times(x: Array, factors: Array | None) -> Array:
    return x if factors is None else x * factors.astype(x.dtype)


def _dot(a: Array, b: Array) -> Array:
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)


def _gradients(
    q_BKMH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    weights_BKMS: Array,
    do_BKMH: Array,
    dot_BKM: Array,
    compute: DTypeLike,
    factors_BKMS: Array | None = None,
    slope_BKMS: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the float32 gradients of queries, keys and values.

    With weights P = exp(scores - lse), of which the result is o = sum(P v) over all
    keys, the scores' gradient is P (do v - do o), `dot` being do o; a cotangent of lse
    is taken from it. Factors are those of `_attend`, `slope` is that of the soft cap.
    """
    dscores_BKMS = einsum("bkmh,bskh->bkms", do_BKMH, v_BSKH, compute, jnp.float32)
    dscores_BKMS = _times(dscores_BKMS, factors_BKMS) - dot_BKM[..., None]
    dscores_BKMS = _times(weights_BKMS.astype(jnp.float32) * dscores_BKMS, slope_BKMS)
    into = compute, jnp.float32
    dq_BKMH = einsum("bkms,bskh->bkmh", dscores_BKMS, k_BSKH, *into)
    # The narrow operand is turned round: XLA's CPU hands such products to its library.
    by_keys = "bkhm,bkms->bkhs"
    dk_BKHS = einsum(by_keys, jnp.swapaxes(q_BKMH, 2, 3), dscores_BKMS, *into)
    used_BKMS = _times(weights_BKMS, factors_BKMS)
    dv_BKHS = einsum(by_keys, jnp.swapaxes(do_BKMH, 2, 3), used_BKMS, *into)
    return dq_BKMH, jnp.moveaxis(dk_BKHS, 3, 1), jnp.moveaxis(dv_BKHS, 3, 1)
