"""Attention by jax's Pallas kernel for TPU ("splash").

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention.ring import Documents, Result
from model.scopes import computed

MULTIPLE = 128  # The least number of positions in a block.


def why_not(
    platform: str, sequence_length: int, head_dim: int, soft_cap: bool, sinks: bool
) -> str | None:
    """Return why the kernel cannot be used, or None if it can."""
    del head_dim, soft_cap, sinks  # The kernel takes any of these.
    if platform != "tpu":
        return "splash attention needs a TPU"
    if sequence_length % MULTIPLE:
        return "splash attention needs a sequence length divisible by 128"
    return None


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    segment_ids_BS: Int[Array, "B S"] | None,
    sinks_N: Float[Array, "N"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Run the Pallas kernel on local rows and heads.

    Queries are the last T of S positions. With a window, blocks before the window are
    skipped too. `interpret` is for tests.
    """
    splash, masks = _library()
    (T, N, H), S = q_BTNH.shape[1:], k_BSKH.shape[1]
    if segment_ids_BS is None:
        segment_ids_BS = jnp.ones(k_BSKH.shape[:2], jnp.int32)
    mask = masks.CausalMask((T, S), S - T)
    if window is not None:
        mask = masks.LocalMask((T, S), (window - 1, 0), S - T)
    kernel = _kernel(
        mask,
        N,
        residual_checkpoint_name="attention",
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )

    def row(q_NTH, k_KSH, v_KSH, segments_S):
        ids = splash.SegmentIds(segments_S[S - T :], segments_S)
        sinks = None if sinks_N is None else _with_gradient_dtype(sinks_N)
        return kernel(q_NTH, k_KSH, v_KSH, segment_ids=ids, sinks=sinks)

    q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
    with nullcontext() if S == T else computed(*_computed(T, S, window or S)):
        out = jax.vmap(row)(q, k, v, segment_ids_BS)
    assert isinstance(out, jax.Array)  # no residuals asked for
    return out.swapaxes(1, 2)


@jax.custom_vjp
def _with_gradient_dtype(sinks_N: Array) -> Array:
    """Return the sinks, and convert their gradient to their dtype.

    The kernel returns that gradient in the dtype of its queries (see
    `_splash_attention_bwd`, which is the same in jax 0.10.2 and 0.12.0).
    """
    return sinks_N


_with_gradient_dtype.defvjp(
    lambda sinks_N: (sinks_N, jnp.zeros((), sinks_N.dtype)),
    lambda like, dsinks_N: (dsinks_N.astype(like.dtype),),
)


def forward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Compute one step of a ring (model/attention/ring.py). `interpret` is for tests.

    The public kernel's derivative cannot take the log-sum-exp over other keys.
    Therefore this function and `backward` call private functions of jax, which are the
    same in jax 0.10.2 and 0.12.0.
    """
    splash, _ = _library()
    kernel = _step_kernel(q_BNTH, k_BKSH, causal, soft_cap, interpret)

    def row(q_NTH, k_KSH, v_KSH, ids):
        segment_ids = None if ids is None else splash.SegmentIds(*ids)
        return splash._splash_attention_forward(
            kernel.fwd_mask_info,
            q_NTH,
            k_KSH,
            v_KSH,
            segment_ids,
            None,
            **kernel.kwargs,
        )

    with nullcontext() if causal else _all_computed(q_BNTH, k_BKSH):
        o_BNTH, (lse_BNT,) = jax.vmap(row)(q_BNTH, k_BKSH, v_BKSH, documents)
    return o_BNTH, lse_BNT


def backward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    result: Result,
    do_BNTH: Float[Array, "B N T H"],
    soft_cap: float | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Compute one step of a ring's backward pass."""
    splash, _ = _library()
    kernel = _step_kernel(q_BNTH, k_BKSH, causal, soft_cap, interpret)

    def row(q_NTH, k_KSH, v_KSH, ids, o_NTH, lse_NT, do_NTH):
        ids = None if ids is None else splash.SegmentIds(*ids)
        masks = kernel.dq_mask_info, kernel.dkv_mask_info
        residuals = (q_NTH, k_KSH, v_KSH, ids, None, o_NTH, lse_NT, *masks)
        grads = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=do_NTH)
        return grads[3:6]

    o_BNTH, lse_BNT = result
    operands = q_BNTH, k_BKSH, v_BKSH, documents, o_BNTH, lse_BNT, do_BNTH
    with nullcontext() if causal else _all_computed(q_BNTH, k_BKSH):
        return jax.vmap(row)(*operands)


def _step_kernel(
    q_BNTH: Array,
    k_BKSH: Array,
    causal: bool,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """Return the kernel of one step of a ring."""
    _, masks = _library()
    shape = q_BNTH.shape[2], k_BKSH.shape[2]
    return _kernel(
        masks.CausalMask(shape) if causal else masks.FullMask(shape),
        q_BNTH.shape[1],
        save_residuals=True,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def _kernel(mask: Any, num_heads: int, **options: Any) -> Any:
    """Return the kernel for a mask that all heads share."""
    splash, masks = _library()
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(math.gcd(*mask.shape)),
        **options,
    )


def _all_computed(q_BNTH: Array, k_BKSH: Array) -> AbstractContextManager:
    T, S = q_BNTH.shape[2], k_BKSH.shape[2]
    blocks = T * S // _block(math.gcd(T, S)) ** 2
    return computed(blocks, blocks)


def _computed(T: int, S: int, window: int) -> tuple[int, int]:
    """Return how many blocks of scores are computed, and how many there are.

    Queries are the last T of S positions.
    """
    block = _block(math.gcd(T, S))
    starts = range(S - T, S, block)
    computed_blocks = sum(
        start // block - max(0, start - window + 1) // block + 1 for start in starts
    )
    return computed_blocks, len(starts) * (S // block)


def _library() -> tuple[Any, Any]:
    """Import jax's kernel and its masks, but only where they are needed."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    return splash_attention_kernel, splash_attention_mask


def _block(T: int) -> int:
    # Wide blocks amortise the grid; narrow ones skip more above the diagonal. With head
    # dims up to 256, the vector memory of v5e, v5p and v6e holds up to 1024 positions;
    # 2048 are too many for v5e and v5p (checked by compiling). Which size is fastest
    # was not measured.
    return next(size for size in (512, 384, 256, 128) if T % size == 0)


def _block_sizes(T: int):
    splash, _ = _library()
    block = _block(T)
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
