"""The products and the softmax of attention, with their own backward pass.

Like flash kernels, the backward pass sums over the head dim of the output instead of
over all keys. On XLA's CPU backend this is five times as fast as products of five dims
with a softmax that JAX differentiates (docs/log).

Shapes: B batch, S key time, K key/value heads, H head dim, M queries that share keys.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.linear import einsum
from model.remat import saveable
from model.row_max import row_max

_MASKED = -1e30


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_grouped(
    q_BKMH: Float[Array, "B K M H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BMS: Bool[Array, "_ M S"],
    factors_BKMS: Float[Array, "B K M S"] | None,
    compute: DTypeLike,
    soft_cap: float | None,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]:
    """Return the output for scaled queries in their dtype, and float32 log-sum-exps.

    Weights are multiplied by the factors, which get no gradient.
    """
    inputs = q_BKMH, k_BSKH, v_BSKH, mask_BMS, factors_BKMS
    return _forward(*inputs, compute=compute, soft_cap=soft_cap)[0]


class _Residuals(NamedTuple):
    """Values that the backward pass of `attend_grouped` needs of the forward pass."""

    q_BKMH: Array
    k_BSKH: Array
    v_BSKH: Array
    weights_BKMS: Array
    o_BKMH: Array
    factors_BKMS: Array | None
    slope_BKMS: Array | None


def _forward(q_BKMH, k_BSKH, v_BSKH, mask_BMS, factors_BKMS, compute, soft_cap):
    scores_BKMS = scores(q_BKMH, k_BSKH, compute, soft_cap)
    weights_BKMS, lse_BKM = softmax(masked(scores_BKMS, mask_BMS))
    weights_BKMS = weights_BKMS.astype(compute)
    used_BKMS = _times(weights_BKMS, factors_BKMS)
    o_BKMH = einsum("bkms,bskh->bkmh", used_BKMS, v_BSKH, compute, q_BKMH.dtype)
    slope_BKMS = slope(scores_BKMS, soft_cap)
    o_BKMH, lse_BKM = saveable(o_BKMH, "attention"), saveable(lse_BKM, "attention")
    return (o_BKMH, lse_BKM), _Residuals(
        q_BKMH=q_BKMH,
        k_BSKH=k_BSKH,
        v_BSKH=v_BSKH,
        weights_BKMS=weights_BKMS,
        o_BKMH=o_BKMH,
        factors_BKMS=factors_BKMS,
        slope_BKMS=slope_BKMS,
    )


def _backward(compute, soft_cap, residuals: _Residuals, cotangents):
    q, k, v, weights_BKMS, o_BKMH, factors_BKMS, slope_BKMS = residuals
    do_BKMH, dlse_BKM = cotangents
    dq, dk, dv = gradients(
        q,
        k,
        v,
        weights_BKMS=weights_BKMS,
        o_BKMH=o_BKMH,
        do_BKMH=do_BKMH,
        dlse_BKM=dlse_BKM,
        compute=compute,
        factors_BKMS=factors_BKMS,
        slope_BKMS=slope_BKMS,
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


attend_grouped.defvjp(_forward, _backward)


def scores(
    q_BKMH: Array, k_BSKH: Array, compute: DTypeLike, soft_cap: float | None
) -> Float[Array, "B K M S"]:
    """Return scores in float32, capped if there is a cap."""
    scores_BKMS = einsum("bkmh,bskh->bkms", q_BKMH, k_BSKH, compute, jnp.float32)
    if soft_cap is None:
        return scores_BKMS
    return soft_cap * jnp.tanh(scores_BKMS / soft_cap)


def slope(capped_BKMS: Array, soft_cap: float | None) -> Array | None:
    """Return the derivative of capped scores with respect to the uncapped ones."""
    return None if soft_cap is None else 1 - jnp.square(capped_BKMS / soft_cap)


def masked(scores_BKMS: Array, mask_BMS: Array) -> Array:
    """Return scores that give no weight to the keys that a query does not see."""
    return jnp.where(mask_BMS[:, None], scores_BKMS, _MASKED)


def softmax(scores_BKMS: Array) -> tuple[Array, Array]:
    """Return the weights and the log-sum-exps of the scores."""
    max_BKM1 = row_max(scores_BKMS)
    weights_BKMS = jnp.exp(scores_BKMS - max_BKM1)
    sum_BKM1 = jnp.sum(weights_BKMS, axis=-1, keepdims=True)
    lse_BKM1 = max_BKM1 + jnp.log(sum_BKM1)
    return weights_BKMS / sum_BKM1, lse_BKM1[..., 0]


def _times(x: Array, factors: Array | None) -> Array:
    return x if factors is None else x * factors.astype(x.dtype)


def _dot(a: Array, b: Array) -> Array:
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)


def gradients(
    q_BKMH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    *,
    weights_BKMS: Array,
    o_BKMH: Array,
    do_BKMH: Array,
    compute: DTypeLike,
    dlse_BKM: Array | None = None,
    factors_BKMS: Array | None = None,
    slope_BKMS: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the float32 gradients of scaled queries, keys and values.

    The weights are P = exp(scores - lse) and the output is o = sum(P v) over all keys.
    The gradient of the scores is P (do v - do o + dlse), times the slope of a soft cap.
    """
    dot_BKM = _dot(do_BKMH, o_BKMH)
    if dlse_BKM is not None:
        dot_BKM -= dlse_BKM
    dscores_BKMS = einsum("bkmh,bskh->bkms", do_BKMH, v_BSKH, compute, jnp.float32)
    dscores_BKMS = _times(dscores_BKMS, factors_BKMS) - dot_BKM[..., None]
    dscores_BKMS = _times(weights_BKMS.astype(jnp.float32) * dscores_BKMS, slope_BKMS)
    product = partial(einsum, compute=compute, out=jnp.float32)
    dq_BKMH = product("bkms,bskh->bkmh", dscores_BKMS, k_BSKH)
    # The narrow operand is transposed, because XLA's CPU backend passes products of
    # this form to its library.
    dk_BKHS = product("bkhm,bkms->bkhs", jnp.swapaxes(q_BKMH, 2, 3), dscores_BKMS)
    used_BKMS = _times(weights_BKMS, factors_BKMS)
    dv_BKHS = product("bkhm,bkms->bkhs", jnp.swapaxes(do_BKMH, 2, 3), used_BKMS)
    return dq_BKMH, jnp.moveaxis(dk_BKHS, 3, 1), jnp.moveaxis(dv_BKHS, 3, 1)
