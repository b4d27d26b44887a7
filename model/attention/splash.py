"""Attention by jax's Pallas kernel for TPU ("splash").

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model import compat
from model.attention.inputs import Chunks, Inputs, Result
from model.remat import saveable
from model.scopes import computed_scope

LENGTH_MULTIPLE = 128  # The smallest block, in positions.
_BLOCK_OPTIONS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv")
_BLOCK_OPTIONS += ("block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")


def attend(
    inputs: Inputs,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Run the Pallas kernel on local rows and heads. Queries are already scaled.

    With a window, the kernel also skips blocks before the window. `interpret` runs the
    kernel without a TPU, in tests.
    """
    _, masks = compat.splash_library()
    (T, N), S = inputs.q_BTNH.shape[1:3], inputs.k_BSKH.shape[1]
    mask = masks.CausalMask((T, S), S - T)
    if window is not None:
        mask = masks.LocalMask((T, S), (window - 1, 0), S - T)
    kernel = _make_kernel(
        mask,
        N,
        save_residuals=True,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    q, k, v = (x.swapaxes(1, 2) for x in inputs[:3])
    ids = inputs.segment_ids_BS
    documents = None if ids is None else (ids[:, S - T :], ids)
    with nullcontext() if S == T else _blocks_scope(T, S, window or S):
        o_BNTH = _attend(kernel, Chunks(q, k, v, documents), inputs.sinks_N)
    return o_BNTH.swapaxes(1, 2)


@jax.custom_vjp
def _attend(kernel: Any, chunks: Chunks, sinks_N: Array | None) -> Any:
    """Run the kernel forward and, for the gradient, backward."""
    return _attend_forward(kernel, chunks, sinks_N)[0]


def _attend_forward(kernel: Any, chunks: Chunks, sinks_N: Array | None):
    run = jax.vmap(partial(compat.splash_step_forward, kernel, sinks_N=sinks_N))
    o, lse = (saveable(x, "attention") for x in run(chunks))
    return o, (kernel, chunks, sinks_N, Result(o, lse))


def _attend_backward(residuals, do_BNTH: Array):
    kernel, chunks, sinks_N, result = residuals
    run = jax.vmap(partial(compat.splash_step_backward, kernel, sinks_N=sinks_N))
    dq, dk, dv, dsinks_BN = run(chunks, result, do_BNTH)
    # The kernel returns the gradient of the sinks in the dtype of the queries.
    dsinks = None if sinks_N is None else jnp.sum(dsinks_BN, 0).astype(sinks_N.dtype)
    return None, Chunks(dq, dk, dv, None), dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def forward(
    chunks: Chunks,
    causal: bool,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Result:
    """Compute one step of a ring (model/attention/ring.py)."""
    kernel = _make_step_kernel(chunks, causal, soft_cap, interpret)
    with _step_scope(chunks, causal):
        return jax.vmap(partial(compat.splash_step_forward, kernel))(chunks)


def backward(
    chunks: Chunks,
    causal: bool,
    result: Result,
    do_BNTH: Float[Array, "B N T H"],
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Sequence[Array]:
    """Compute one step of a ring's backward pass."""
    kernel = _make_step_kernel(chunks, causal, soft_cap, interpret)
    run = jax.vmap(partial(compat.splash_step_backward, kernel))
    with _step_scope(chunks, causal):
        return run(chunks, result, do_BNTH)[:3]


def _make_step_kernel(
    chunks: Chunks, causal: bool, soft_cap: float | None, interpret: bool
) -> Any:
    _, masks = compat.splash_library()
    shape = chunks.q_BNTH.shape[2], chunks.k_BKSH.shape[2]
    return _make_kernel(
        masks.CausalMask(shape) if causal else masks.FullMask(shape),
        chunks.q_BNTH.shape[1],
        save_residuals=True,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def _step_scope(chunks: Chunks, causal: bool) -> AbstractContextManager:
    """Return a scope that records that an unmasked ring step skips no blocks."""
    T, S = chunks.q_BNTH.shape[2], chunks.k_BKSH.shape[2]
    blocks = T * S // _block_size(math.gcd(T, S)) ** 2
    return nullcontext() if causal else computed_scope(blocks, blocks)


def _make_kernel(mask: Any, num_heads: int, **options: Any) -> Any:
    """Return the kernel for a mask that all heads share."""
    splash, masks = compat.splash_library()
    block = _block_size(math.gcd(mask.shape[0], mask.shape[1]))
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**dict.fromkeys(_BLOCK_OPTIONS, block)),
        **options,
    )


def _blocks_scope(T: int, S: int, window: int) -> AbstractContextManager:
    """Return a scope with the number of blocks computed for the last T of S queries."""
    block = _block_size(math.gcd(T, S))
    starts = range(S - T, S, block)
    blocks = sum(
        start // block - max(0, start - window + 1) // block + 1 for start in starts
    )
    return computed_scope(blocks, len(starts) * (S // block))


def _block_size(T: int) -> int:
    # Wide blocks need fewer steps; narrow blocks skip more above the diagonal. With
    # head dims up to 256, blocks of 1024 positions fit the vector memory of v5e, v5p
    # and v6e; 2048 do not fit v5e and v5p. These sizes were compiled, but not timed.
    return next(size for size in (512, 384, 256, 128) if T % size == 0)
