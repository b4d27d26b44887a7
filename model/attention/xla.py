"""Attention as two products and a softmax, on every platform.

One product handles the queries of all heads that share keys, as rows
(model/attention/dense.py). Causal attention is computed in blocks of queries, and each
block leaves out the keys after the block (docs/log).

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim, M = T N/K queries that share keys, head by head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.attention import dense, masks
from model.attention.dense import Operands
from model.attention.inputs import Attended, Chunks, Inputs, Result, score_bound
from model.products import einsum

LENGTH_MULTIPLE = 1  # The number of positions in a chunk must be a multiple of this.
SCALES_QUERIES = True
_MIN_BLOCK_SIZE = 128
_MAX_NUM_BLOCKS = 4

Drop = Callable[[Array], Array]  # Takes and returns weights [B, T, K, N/K, S].


def attend(
    inputs: Inputs, *, window: int | None = None, soft_cap: float | None = None
) -> Attended:
    """Attend on local rows and heads, with the signature of the other kernels."""
    mask_BTS = masks.causal_mask(inputs.q_BTNH.shape[1], inputs.segment_ids_BS, window)
    compute = inputs.q_BTNH.dtype
    return attend_masked(inputs, mask_BTS, compute, soft_cap=soft_cap, causal=True)


def attend_masked(
    inputs: Inputs,
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
    *,
    soft_cap: float | None = None,
    drop: Drop | None = None,
    causal: bool = False,
) -> Attended:
    """Attend where the mask is true, with weights [B, N, T, S] in memory.

    Only the mask separates documents: segment ids are not read. `drop` applies dropout
    to the weights. `causal` states that the mask comes from `causal_mask`: each block
    of queries then leaves out the keys after the block.
    """
    B, T, N, H = inputs.q_BTNH.shape
    S, K = inputs.k_BSKH.shape[1:3]
    q_BNTH = jnp.swapaxes(inputs.q_BTNH * H**-0.5, 1, 2)
    factors_BTKGS = None
    if drop is not None:
        factors_BTKGS = drop(jnp.ones((B, T, K, N // K, S), compute))
    block_size = T // _num_blocks(T) if causal else T
    outputs = []
    lses = []
    for start in range(0, T, block_size):
        block = slice(start, start + block_size)
        keys = slice(S - T + start + block_size)
        factors_BKMS = None
        if factors_BTKGS is not None:
            factors_BKGTS = jnp.moveaxis(factors_BTKGS[:, block, ..., keys], 1, 3)
            factors_BKMS = factors_BKGTS.reshape(B, K, -1, factors_BKGTS.shape[-1])
        operands = Operands(
            q_BNTH[:, :, block].reshape(B, K, -1, H),
            inputs.k_BSKH[:, keys],
            inputs.v_BSKV[:, keys],
            _repeat_for_heads(mask_BTS[:, block, keys], N // K),
            factors_BKMS,
        )
        o_BKMV, lse_BKM = dense.attend_grouped(operands, compute, soft_cap)  # pyright: ignore[reportGeneralTypeIssues]
        outputs.append(o_BKMV.reshape(B, N, block_size, -1))
        lses.append(lse_BKM.reshape(B, N, block_size))
    o_BNTV = jnp.concatenate(outputs, axis=2)
    lse_BNT = jnp.concatenate(lses, axis=2)
    o_BTNV = jnp.swapaxes(o_BNTV, 1, 2)
    bound_N = score_bound(lse_BNT)
    if inputs.sinks_N is None:
        return Attended(o_BTNV, bound_N)
    sinks_N = inputs.sinks_N.astype(jnp.float32)
    # The sink has the remaining weight, and its value is zero.
    share_BNT = jax.nn.sigmoid(lse_BNT - sinks_N[None, :, None])
    share_BTN1 = jnp.swapaxes(share_BNT, 1, 2)[..., None].astype(o_BTNV.dtype)
    return Attended(o_BTNV * share_BTN1, bound_N)


def _num_blocks(T: int) -> int:
    """Return the number of equal blocks that T queries are divided into."""
    candidates = range(1, _MAX_NUM_BLOCKS + 1)
    valid = [n for n in candidates if T % n == 0 and n * _MIN_BLOCK_SIZE <= T]
    return max(valid, default=1)


def forward(chunks: Chunks, causal: bool, soft_cap: float | None = None) -> Result:
    """Compute one step of a ring (`ring.py`); the result is float32."""
    x = _operands(chunks, causal)
    shape = chunks.q_BNTH.shape
    scores_BKMS = dense.scores(x, chunks.q_BNTH.dtype, soft_cap)
    weights_BKMS, lse_BKM = dense.softmax(dense.apply_mask(scores_BKMS, x))
    o_BKMV = einsum(
        "bkms,bskv->bkmv", weights_BKMS, x.v_BSKV, x.v_BSKV.dtype, jnp.float32
    )
    return Result(o_BKMV.reshape(*shape[:3], -1), lse_BKM.reshape(shape[:3]))


def backward(
    chunks: Chunks,
    causal: bool,
    result: Result,
    do_BNTV: Float[Array, "B N T V"],
    soft_cap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Compute one step of a ring's backward pass; the gradients are float32."""
    x = _operands(chunks, causal)
    compute = chunks.q_BNTH.dtype
    shape = x.q_BKMH.shape
    scores_BKMS = dense.scores(x, compute, soft_cap)
    lse_BKM1 = result.lse_BNT.reshape(*shape[:3], 1)
    weights_BKMS = jnp.exp(dense.apply_mask(scores_BKMS, x) - lse_BKM1)
    dq_BKMH, dk_BSKH, dv_BSKV = dense.gradients(
        x,
        weights_BKMS=weights_BKMS.astype(compute),
        o_BKMV=result.o_BNTV.reshape(*shape[:3], -1),
        do_BKMV=do_BNTV.reshape(*shape[:3], -1),
        compute=compute,
        slope_BKMS=dense.soft_cap_slope(scores_BKMS, soft_cap),
    )
    dk_BKSH = jnp.swapaxes(dk_BSKH, 1, 2)
    dv_BKSV = jnp.swapaxes(dv_BSKV, 1, 2)
    return dq_BKMH.reshape(chunks.q_BNTH.shape), dk_BKSH, dv_BKSV


def _operands(chunks: Chunks, causal: bool) -> Operands:
    """Return a ring step's operands. Query heads that share keys become rows."""
    B, N, T, H = chunks.q_BNTH.shape
    K, S = chunks.k_BKSH.shape[1:3]
    mask_BTS = chunks.same_document_BTS
    if mask_BTS is None:
        mask_BTS = jnp.ones((1, T, S), bool)
    if causal:
        mask_BTS &= jnp.tril(jnp.ones((T, S), bool))[None]
    return Operands(
        chunks.q_BNTH.reshape(B, K, -1, H),
        jnp.swapaxes(chunks.k_BKSH, 1, 2),
        jnp.swapaxes(chunks.v_BKSV, 1, 2),
        _repeat_for_heads(mask_BTS, N // K),
    )


def _repeat_for_heads(
    mask_BTS: Bool[Array, "_ T S"], num_heads: int
) -> Bool[Array, "_ M S"]:
    """Repeat a mask for each of the query heads that share keys."""
    return jnp.tile(mask_BTS, (1, num_heads, 1))
