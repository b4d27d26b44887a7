"""Attention as two products and a softmax, on every platform.

The queries of the heads that share keys are rows of one product
(model/attention/dense.py). Causal attention is computed in blocks of queries, and each
block leaves out the keys after it (docs/log).

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
M = T N/K queries that share keys, head by head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.attention import dense
from model.attention.ring import Documents, Result
from model.linear import einsum

MULTIPLE = 1  # The number of positions in a chunk must be a multiple of it.
_MIN_BLOCK, _MAX_BLOCKS = 128, 4

Drop = Callable[[Array], Array]  # Takes and returns weights [B, T, K, N/K, S].


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
    *,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    drop: Drop | None = None,
    causal: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend where the mask is true, with weights [B, N, T, S] in memory.

    `drop` drops weights at random. `sinks_N` has one more score for each head, of a key
    whose value is zero: it takes its share of the weights from all other keys.
    `causal` states that the mask comes from `masks.causal` and that queries are the
    last T of S positions. Then a block of queries leaves out the keys after it.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BNTH = jnp.swapaxes(q_BTNH * H**-0.5, 1, 2)
    factors_BTKGS = None
    if drop is not None:
        factors_BTKGS = drop(jnp.ones((B, T, K, N // K, S), compute))
    block_size = T // _num_blocks(T) if causal else T
    outputs, lses = [], []
    for start in range(0, T, block_size):
        block = slice(start, start + block_size)
        keys = slice(S - T + start + block_size)
        output, lse = _attend_block(
            q_BNTH[:, :, block],
            k_BSKH[:, keys],
            v_BSKH[:, keys],
            mask_BTS[:, block, keys],
            None if factors_BTKGS is None else factors_BTKGS[:, block, ..., keys],
            compute=compute,
            soft_cap=soft_cap,
        )
        outputs.append(output)
        lses.append(lse)
    o_BNTH, lse_BNT = jnp.concatenate(outputs, axis=2), jnp.concatenate(lses, axis=2)
    o_BTNH = jnp.swapaxes(o_BNTH, 1, 2)
    if sinks_N is None:
        return o_BTNH
    share_BNT = jax.nn.sigmoid(lse_BNT - sinks_N.astype(jnp.float32)[None, :, None])
    return o_BTNH * jnp.swapaxes(share_BNT, 1, 2)[..., None].astype(o_BTNH.dtype)


def _attend_block(
    q_BNTH: Float[Array, "B N T H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    factors_BTKGS: Float[Array, "B T K N/K S"] | None,
    *,
    compute: DTypeLike,
    soft_cap: float | None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Return the output for a block of scaled queries, and its log-sum-exps."""
    B, N, T, H = q_BNTH.shape
    S, K = k_BSKH.shape[1:3]
    factors_BKMS = None
    if factors_BTKGS is not None:
        factors_BKMS = jnp.moveaxis(factors_BTKGS, 1, 3).reshape(B, K, -1, S)
    result: Any = dense.attend_grouped(
        q_BNTH.reshape(B, K, -1, H),
        k_BSKH,
        v_BSKH,
        _repeat_for_heads(mask_BTS, N // K),
        factors_BKMS,
        compute,
        soft_cap,
    )
    o_BKMH, lse_BKM = result
    return o_BKMH.reshape(q_BNTH.shape), lse_BKM.reshape(B, N, T)


def _num_blocks(T: int) -> int:
    """Return the number of equal blocks that T queries are divided into."""
    counts = range(1, _MAX_BLOCKS + 1)
    fitting = [n for n in counts if T % n == 0 and n * _MIN_BLOCK <= T]
    return max(fitting, default=1)


def forward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Compute one step of a ring (model/attention/ring.py) in float32."""
    x = _Operands.of_ring(q_BNTH, k_BKSH, v_BKSH, documents, causal)
    scores_BKMS = dense.scores(x.q_BKMH, x.k_BSKH, q_BNTH.dtype, soft_cap)
    weights_BKMS, lse_BKM = dense.softmax(dense.masked(scores_BKMS, x.mask_BMS))
    o_BKMH = einsum(
        "bkms,bskh->bkmh", weights_BKMS, x.v_BSKH, v_BKSH.dtype, jnp.float32
    )
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
    """Compute one step of a ring's backward pass; the gradients are float32."""
    x = _Operands.of_ring(q_BNTH, k_BKSH, v_BKSH, documents, causal)
    compute, shape = q_BNTH.dtype, x.q_BKMH.shape
    scores_BKMS = dense.scores(x.q_BKMH, x.k_BSKH, compute, soft_cap)
    slope_BKMS = dense.slope(scores_BKMS, soft_cap)
    lse_BKM1 = result.lse_BNT.reshape(*shape[:3], 1)
    weights_BKMS = jnp.exp(dense.masked(scores_BKMS, x.mask_BMS) - lse_BKM1)
    dq_BKMH, dk_BSKH, dv_BSKH = dense.gradients(
        x.q_BKMH,
        x.k_BSKH,
        x.v_BSKH,
        weights_BKMS=weights_BKMS.astype(compute),
        o_BKMH=result.o_BNTH.reshape(shape),
        do_BKMH=do_BNTH.reshape(shape),
        compute=compute,
        slope_BKMS=slope_BKMS,
    )
    dk_BKSH, dv_BKSH = jnp.swapaxes(dk_BSKH, 1, 2), jnp.swapaxes(dv_BSKH, 1, 2)
    return dq_BKMH.reshape(q_BNTH.shape), dk_BKSH, dv_BKSH


class _Operands(NamedTuple):
    """Operands in the layout of this module: heads that share keys are rows."""

    q_BKMH: Array
    k_BSKH: Array
    v_BSKH: Array
    mask_BMS: Array

    @classmethod
    def of_ring(
        cls,
        q_BNTH: Array,
        k_BKSH: Array,
        v_BKSH: Array,
        documents: Documents,
        causal: bool,
    ) -> "_Operands":
        """Return the operands of a ring's step in this layout, with their mask."""
        (B, N, T, H), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
        mask_BTS = jnp.ones((1, T, S), bool)
        if documents is not None:
            mask_BTS = documents[0][:, :, None] == documents[1][:, None]
        if causal:
            mask_BTS &= jnp.tril(jnp.ones((T, S), bool))[None]
        return cls(
            q_BNTH.reshape(B, K, -1, H),
            jnp.swapaxes(k_BKSH, 1, 2),
            jnp.swapaxes(v_BKSH, 1, 2),
            _repeat_for_heads(mask_BTS, N // K),
        )


def _repeat_for_heads(
    mask_BTS: Bool[Array, "_ T S"], heads: int
) -> Bool[Array, "_ M S"]:
    """Repeat a mask for each of the heads that share keys."""
    return jnp.tile(mask_BTS, (1, heads, 1))
