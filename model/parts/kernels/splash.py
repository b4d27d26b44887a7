"""Attention by jax's Pallas kernel for TPU ("splash").

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention.inputs import Attended, Chunks, Inputs, Result, score_bound
from model.gather import AxisSteps, WeightPlacement
from model.parts.kernels import compat
from model.remat import saveable

LENGTH_MULTIPLE = 128  # The smallest block, in positions.
SCALES_QUERIES = False  # The caller scales them, before their rotation.
_BLOCK_OPTIONS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv")
_BLOCK_OPTIONS += ("block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")


def attend(
    inputs: Inputs,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Attended:
    """Run the Pallas kernel on local rows and heads. Queries are already scaled.

    With a window, the kernel also skips blocks before the window. `interpret` runs the
    kernel without a TPU, in tests.
    """
    _, masks = compat.splash_library()
    T, N = inputs.q_BTNH.shape[1:3]
    S = inputs.k_BSKH.shape[1]
    mask = masks.CausalMask((T, S), S - T)
    if window is not None:
        mask = masks.LocalMask((T, S), (window - 1, 0), S - T)
    kernel = _make_kernel(
        mask, N, save_residuals=True, attn_logits_soft_cap=soft_cap, interpret=interpret
    )
    q, k, v = (x.swapaxes(1, 2) for x in inputs[:3])
    ids = inputs.segment_ids_BS
    documents = None if ids is None else (ids[:, S - T :], ids)
    return _attended(_attend(kernel, Chunks(q, k, v, documents), inputs.sinks_N))


def _attended(result: Result) -> Attended:
    return Attended(result.o_BNTV.swapaxes(1, 2), score_bound(result.lse_BNT))


@jax.custom_vjp
def _attend(kernel: Any, chunks: Chunks, sinks_N: Array | None) -> Any:
    """Run the kernel forward and, for the gradient of the output, backward."""
    return _attend_forward(kernel, chunks, sinks_N)[0]


def _attend_forward(kernel: Any, chunks: Chunks, sinks_N: Array | None):
    # If rematerialisation saved both results, nothing uses the forward pass that is run
    # again. JAX removes it then, but only under `jit`.
    run = jax.jit(jax.vmap(partial(compat.splash_forward, sinks_N=sinks_N), (None, 0)))
    # The kernel repeats lse over lanes. Without the barrier, XLA would keep that array.
    result = jax.lax.optimization_barrier(run(kernel, chunks))
    o, lse = (saveable(x, "attention") for x in result)
    return Result(o, lse), (kernel, chunks, sinks_N, Result(o, lse))


def _attend_backward(residuals, cotangents: Result):
    # The log-sum-exps have no cotangent: `score_bound`, their only reader, stops it.
    do_BNTV, _ = cotangents
    kernel, chunks, sinks_N, result = residuals
    run = jax.vmap(partial(compat.splash_backward, kernel, sinks_N=sinks_N))
    dq, dk, dv, dsinks_BN = run(chunks, result, do_BNTV)
    # Without the barrier, XLA could compute dq later, and keep gathered keys for it.
    dq, dk, dv = jax.lax.optimization_barrier((dq, dk, dv))
    # The kernel returns the gradient of the sinks in the dtype of the queries.
    dsinks = None if sinks_N is None else jnp.sum(dsinks_BN, 0).astype(sinks_N.dtype)
    return None, Chunks(dq, dk, dv, None), dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def attend_gathered(
    inputs: Inputs,
    *,
    axes: tuple[str, ...],
    axis_steps: tuple[AxisSteps, ...] = (),
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Attended:
    """Attend from a device's queries to the gathered keys of whole rows.

    The manual mesh axes `axes` divide each row among c devices: device i has the chunks
    i and 2c-1-i of 2c, as in a ring (model/parts/context/ring.py). A query sees its own
    and earlier positions, so the kernel's blocks depend on the device. The gradients of
    keys and values are reduce-scattered in their dtype. `axis_steps`: see `AxisSteps`.
    """
    _, masks = compat.splash_library()
    q, k, v = (x.swapaxes(1, 2) for x in inputs[:3])
    if k.shape[2] == q.shape[2]:  # Otherwise keys and values are already gathered.
        platform = "cpu" if interpret else "tpu"
        k, v = (gather_positions(x, axes, axis_steps, platform) for x in (k, v))
    documents = None
    if (ids := inputs.segment_ids_BS) is not None:
        documents = ids, jax.lax.all_gather(ids, axes, axis=1, tiled=True)
    T = q.shape[2]
    size = _block_size(T // 2)
    kernel = _make_kernel(
        masks.FullMask((size, size)),
        q.shape[1],
        save_residuals=True,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    seen_blocks = _seen_blocks(T // 2 // size, axes)
    kernel = compat.splash_with_blocks(kernel, seen_blocks, size)
    return _attended(_attend(kernel, Chunks(q, k, v, documents), inputs.sinks_N))


def gather_positions(
    x_BKTH: Float[Array, "B K T H"],
    axes: tuple[str, ...],
    axis_steps: tuple[AxisSteps, ...] = (),
    platform: str = "tpu",
) -> Float[Array, "B K S H"]:
    """Gather the positions of whole rows, in the order of the devices.

    The gradient is reduce-scattered in its dtype.
    """
    placement = WeightPlacement(
        sharded_dims=((0, axes),),
        reduce_dtype=x_BKTH.dtype,
        platform=platform,
        axis_steps=axis_steps,
    )
    return _gather_positions(placement, x_BKTH)  # pyright: ignore[reportReturnType]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_positions(placement: WeightPlacement, x_BKTH: Array) -> Any:
    """Gather positions. `placement` divides dim 0, as in `_gather_backward`."""
    (_, axes), *_ = placement.sharded_dims
    placement = placement._replace(sharded_dims=((1, axes),), is_stack=True)
    B, K, T, H = x_BKTH.shape
    return placement.gather(x_BKTH.reshape(B * K, T, H)).reshape(B, K, -1, H)


def _gather_forward(placement: WeightPlacement, x_BKTH: Array):
    return _gather_positions(placement, x_BKTH), None


def _gather_backward(placement: WeightPlacement, _, dx_BKSH: Array):
    # Positions are the first dim of one wide matrix. XLA:TPU would replace the
    # reduce-scatter of a stack of matrices that are only H wide by an all-reduce.
    B, K, S, H = dx_BKSH.shape
    rows = dx_BKSH.transpose(2, 0, 1, 3).reshape(S, B * K * H)
    dx_TBKH = placement.reduce_scatter(rows).reshape(-1, B, K, H)
    return (dx_TBKH.transpose(1, 2, 0, 3),)


_gather_positions.defvjp(_gather_forward, _gather_backward)


def _seen_blocks(n: int, axes: tuple[str, ...]) -> Int[Array, "Q S"]:
    """Return for each block of a device's queries which blocks of keys they see.

    0 stands for no key of a block, 1 for those up to the diagonal, 2 for all keys. The
    gathered keys are in the order of the devices. A chunk has n blocks.
    """
    c = jax.lax.psum(1, axes)
    device = jax.lax.axis_index(axes)
    devices_c = jnp.arange(c)
    chunks_c2 = jnp.stack([devices_c, 2 * c - 1 - devices_c], axis=1)
    positions = chunks_c2[..., None] * n + jnp.arange(n)[None, None]
    queries_Q = positions[device].reshape(-1)
    keys_S = positions.reshape(-1)
    distance_QS = queries_Q[:, None] - keys_S[None]
    return jnp.sign(distance_QS) + 1


def forward(
    chunks: Chunks, causal: bool, soft_cap: float | None = None, interpret: bool = False
) -> Result:
    """Compute one step of a ring (model/parts/context/ring.py)."""
    kernel = _make_step_kernel(chunks, causal, soft_cap, interpret)
    return jax.vmap(partial(compat.splash_forward, kernel))(chunks)


def backward(
    chunks: Chunks,
    causal: bool,
    result: Result,
    do_BNTV: Float[Array, "B N T V"],
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Sequence[Array]:
    """Compute one step of a ring's backward pass."""
    kernel = _make_step_kernel(chunks, causal, soft_cap, interpret)
    run = jax.vmap(partial(compat.splash_backward, kernel))
    return run(chunks, result, do_BNTV)[:3]


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


def _block_size(T: int) -> int:
    # Wide blocks need fewer steps; narrow blocks skip more above the diagonal. With
    # head dims up to 256, blocks of 1024 positions fit the vector memory of v5e, v5p
    # and v6e; 2048 do not fit v5e and v5p. These sizes were compiled, but not timed.
    return next(size for size in (512, 384, 256, 128) if T % size == 0)
