"""The products and the softmax of attention, with a custom backward pass.

As in flash kernels, the softmax gradient sums over the head dim of the output instead
of over all keys, and products have four dims. On XLA's CPU backend, this is five times
as fast as JAX's own softmax gradient with products of five dims (docs/log).

Shapes: B batch, S key time, K key/value heads, H head dim, V value dim, M queries of
all heads that share keys.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.products import einsum
from model.remat import saveable
from model.row_max import row_max

_MASKED = -1e30


class Operands(NamedTuple):
    """Queries (scaled by 1/sqrt(H)), keys and values.

    mask_BMS: true where a query sees a key. `gradients` does not need a mask.
    factors_BKMS: factors of the weights, such as those of dropout, without gradient.
    """

    q_BKMH: Float[Array, "B K M H"]
    k_BSKH: Float[Array, "B S K H"]
    v_BSKV: Float[Array, "B S K V"]
    mask_BMS: Bool[Array, "_ M S"] | None
    factors_BKMS: Float[Array, "B K M S"] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend_grouped(
    x: Operands, compute: DTypeLike, soft_cap: float | None
) -> tuple[Float[Array, "B K M V"], Float[Array, "B K M"]]:
    """Return the output in the queries' dtype and the scores' float32 log-sum-exps."""
    return _forward(x, compute, soft_cap)[0]


def _forward(x: Operands, compute: DTypeLike, soft_cap: float | None):
    scores_BKMS = scores(x, compute, soft_cap)
    weights_BKMS, lse_BKM = softmax(apply_mask(scores_BKMS, x))
    weights_BKMS = weights_BKMS.astype(compute)
    factored_BKMS = _scale(weights_BKMS, x.factors_BKMS)
    o_BKMV = einsum("bkms,bskv->bkmv", factored_BKMS, x.v_BSKV, compute, x.q_BKMH.dtype)
    slope_BKMS = soft_cap_slope(scores_BKMS, soft_cap)
    o_BKMV = saveable(o_BKMV, "attention")
    lse_BKM = saveable(lse_BKM, "attention")
    residuals = x._replace(mask_BMS=None), weights_BKMS, o_BKMV, slope_BKMS
    return (o_BKMV, lse_BKM), residuals


def _backward(compute: DTypeLike, soft_cap: float | None, residuals, cotangents):
    x, weights_BKMS, o_BKMV, slope_BKMS = residuals
    do_BKMV, dlse_BKM = cotangents
    dq, dk, dv = gradients(
        x,
        weights_BKMS=weights_BKMS,
        o_BKMV=o_BKMV,
        do_BKMV=do_BKMV,
        dlse_BKM=dlse_BKM,
        compute=compute,
        slope_BKMS=slope_BKMS,
    )
    dk = dk.astype(x.k_BSKH.dtype)
    dv = dv.astype(x.v_BSKV.dtype)
    return (Operands(dq.astype(x.q_BKMH.dtype), dk, dv, None, None),)


attend_grouped.defvjp(_forward, _backward)


def scores(
    x: Operands, compute: DTypeLike, soft_cap: float | None
) -> Float[Array, "B K M S"]:
    """Return the float32 scores, with the soft cap if one is given."""
    scores_BKMS = einsum("bkmh,bskh->bkms", x.q_BKMH, x.k_BSKH, compute, jnp.float32)
    if soft_cap is None:
        return scores_BKMS
    return soft_cap * jnp.tanh(scores_BKMS / soft_cap)


def soft_cap_slope(capped_BKMS: Array, soft_cap: float | None) -> Array | None:
    """Return the derivative of capped scores with respect to uncapped scores."""
    return None if soft_cap is None else 1 - jnp.square(capped_BKMS / soft_cap)


def apply_mask(scores_BKMS: Array, x: Operands) -> Array:
    """Return the scores with a large negative value where the mask is false."""
    assert x.mask_BMS is not None
    return jnp.where(x.mask_BMS[:, None], scores_BKMS, _MASKED)


def softmax(scores_BKMS: Array) -> tuple[Array, Array]:
    """Return the weights and the log-sum-exps of the scores."""
    max_BKM1 = row_max(scores_BKMS)
    weights_BKMS = jnp.exp(scores_BKMS - max_BKM1)
    sum_BKM1 = jnp.sum(weights_BKMS, axis=-1, keepdims=True)
    lse_BKM1 = max_BKM1 + jnp.log(sum_BKM1)
    return weights_BKMS / sum_BKM1, lse_BKM1[..., 0]


def _scale(x: Array, factors: Array | None) -> Array:
    return x if factors is None else x * factors.astype(x.dtype)


def gradients(
    x: Operands,
    *,
    weights_BKMS: Array,
    o_BKMV: Array,
    do_BKMV: Array,
    compute: DTypeLike,
    dlse_BKM: Array | None = None,
    slope_BKMS: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the float32 gradients of scaled queries, keys and values.

    The weights are P = exp(scores - lse) and the output is o = sum(P v) over all keys.
    The gradient of the scores is P (do v - do o + dlse), times the slope of a soft cap.
    """
    product = partial(einsum, compute=compute, out=jnp.float32)
    dot_BKM = jnp.sum(do_BKMV.astype(jnp.float32) * o_BKMV.astype(jnp.float32), axis=-1)
    if dlse_BKM is not None:
        dot_BKM -= dlse_BKM
    dscores_BKMS = product("bkmv,bskv->bkms", do_BKMV, x.v_BSKV)
    dscores_BKMS = _scale(dscores_BKMS, x.factors_BKMS) - dot_BKM[..., None]
    dscores_BKMS = _scale(weights_BKMS.astype(jnp.float32) * dscores_BKMS, slope_BKMS)
    dq_BKMH = product("bkms,bskh->bkmh", dscores_BKMS, x.k_BSKH)
    # Transpose the small operand (q or do), because XLA's CPU backend passes products
    # of this form to its matrix library.
    dk_BKHS = product("bkhm,bkms->bkhs", jnp.swapaxes(x.q_BKMH, 2, 3), dscores_BKMS)
    factored_BKMS = _scale(weights_BKMS, x.factors_BKMS)
    dv_BKVS = product("bkvm,bkms->bkvs", jnp.swapaxes(do_BKMV, 2, 3), factored_BKMS)
    return dq_BKMH, jnp.moveaxis(dk_BKHS, 3, 1), jnp.moveaxis(dv_BKVS, 3, 1)
