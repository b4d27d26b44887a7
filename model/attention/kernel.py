"""Causal attention within documents: one function over four kernels.

- `xla` runs on every platform and stores the [B, N, T, S] scores in memory.
- `cudnn` is NVIDIA's fused kernel. With documents it also needs a [B, 1, T, S] mask.
- `cudnn_packed` is the same kernel, given the documents' offsets instead of a mask.
- `splash` is jax's Pallas kernel for TPU. It never stores all scores, and it skips
  blocks above the diagonal.

No kernel falls back to another: a feature that a kernel lacks is an error.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.attention import masks, xla
from model.attention.inputs import Attended, Inputs
from model.choices import Attention, ContextAttention
from model.parts.context.context_parallel import (
    KERNELS,
    make_context_parallel_attention,
)
from model.parts.kernels import cudnn, splash
from model.placement import ONE_DEVICE, Placement

_CUDNN = Attention.cudnn
_PLATFORM_KERNELS = {"tpu": Attention.splash, "cuda": _CUDNN, "gpu": _CUDNN}


def choose_kernel(
    setting: Attention,
    platform: str,
    sequence_length: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    soft_cap: bool = False,
    sinks: bool = False,
    dropout: bool = False,
) -> Attention:
    """Return the kernel for a setting; `auto` selects the platform's own kernel.

    `value_dim` is the dim of a head's values if it differs from that of its queries.

    Raises:
        ValueError: if the kernel cannot compute this attention. `auto` does not fall
            back to a slower kernel either.
    """
    kernel = setting
    if setting is Attention.auto:
        kernel = _PLATFORM_KERNELS.get(platform, Attention.xla)
    if kernel is Attention.xla:
        return kernel
    rules = [(not dropout, "drops no weights (model.dropout.attention)")]
    if kernel is Attention.splash:
        multiple = splash.LENGTH_MULTIPLE
        length_fits = sequence_length % multiple == 0
        rules += [
            (platform == "tpu", "needs a TPU"),
            (length_fits, f"needs a sequence length divisible by {multiple}"),
        ]
    else:
        length_fits = sequence_length % cudnn.LENGTH_MULTIPLE == 0
        head_dim_fits = head_dim % 8 == 0 and head_dim <= 256
        rules += [
            (platform in ("cuda", "gpu"), "needs an NVIDIA GPU"),
            (head_dim_fits, "needs a head dim that is a multiple of 8, up to 256"),
            ((value_dim or 0) <= head_dim, f"needs model.value_head_dim <= {head_dim}"),
            (length_fits, "needs an even sequence length"),
            (not soft_cap, "does not cap scores (model.attention_soft_cap)"),
            (not sinks, "has no sinks (model.attention_sinks)"),
        ]
    for holds, text in rules:
        if not holds:
            raise ValueError(
                f"{kernel} attention {text}; change it, or take model.attention=xla "
                "(slower)"
            )
    return kernel


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKV: Float[Array, "B S K V"],
    segment_ids_BT: Int[Array, "B T"] | None,
    *,
    implementation: Attention,
    compute: DTypeLike,
    placement: Placement = ONE_DEVICE,
    context: ContextAttention = ContextAttention.ring,
    drop: xla.Drop | None = None,
    window: int | None = None,
    local_flag: Bool[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Attended:
    """Attend from each position to itself and to earlier positions of its document.

    S equals T, unless keys and values are already gathered for `all_gather`. The output
    has the dtype of the queries. `implementation` and `context` must not be `auto`.
    Each device runs the kernel on its local shard. The queries of `splash` are already
    scaled by 1/sqrt(H); other kernels scale them. V may differ from H: for cuDNN, whose
    kernel takes a single dim, values are padded with zeros.

    A query sees at most `window` keys, its own included. `local_flag` decides at run
    time whether the window applies to this layer. A soft cap c turns scores into
    c tanh(score / c). `drop` applies dropout to the weights: only `xla` supports it,
    and only if no two devices share a row. `Inputs` explains segment ids and sinks.
    None disables each of these features.
    """
    T, shares_rows = q_BTNH.shape[1], bool(placement.sequence_axes)
    if window is not None and window >= T * jax.lax.psum(1, placement.sequence_axes):
        window = None
    inputs = Inputs(q_BTNH, k_BSKH, v_BSKV, segment_ids_BT, sinks_N)
    if implementation is Attention.xla and not shares_rows:
        layer_window = masks.layer_window(window, local_flag, T)
        mask_BTS = masks.causal_mask(T, segment_ids_BT, layer_window)
        return xla.attend_masked(
            inputs, mask_BTS, compute, soft_cap=soft_cap, drop=drop, causal=True
        )
    assert drop is None, "train/core/execution.py refuses dropout here"
    q, k, v = (x.astype(compute) for x in (q_BTNH, k_BSKH, v_BSKV))
    is_sharded_like_q = placement.spec("heads") == placement.spec("kv_heads")
    kv_axis = "kv_heads" if is_sharded_like_q else "heads"
    if not is_sharded_like_q:
        # A device may lack the key heads of its query heads. Repeat each key head for
        # every query head that shares it, and shard k and v like q.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    V, H = v.shape[-1], q.shape[-1]
    is_padded = V < H and implementation.is_cudnn
    if is_padded:
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, H - V)))
    make_attend = partial(
        _make_attend_on_shards,
        implementation,
        placement=placement,
        context=context,
        kv_axis=kv_axis,
        soft_cap=soft_cap,
    )
    if window is None or local_flag is None:
        attend_rows = make_attend(window=window)
    else:
        # A kernel's mask is fixed at compile time. Therefore layers with and without a
        # window take different branches.
        branches = make_attend(window=window), make_attend(window=None)
        attend_rows = partial(jax.lax.cond, local_flag, *branches)
    o_BTNV, bound_N = attend_rows(Inputs(q, k, v, segment_ids_BT, sinks_N))
    o_BTNV = o_BTNV[..., :V] if is_padded else o_BTNV
    return Attended(o_BTNV.astype(q_BTNH.dtype), bound_N)


def _make_attend_on_shards(
    implementation: Attention,
    *,
    window: int | None,
    soft_cap: float | None,
    placement: Placement,
    context: ContextAttention,
    kv_axis: str,
) -> Callable[[Inputs], Attended]:
    """Return a function that runs the kernel per shard: XLA cannot partition kernels.

    `kv_axis` is the logical axis of the heads of keys and values.
    """
    kernel = KERNELS[implementation]
    if placement.sequence_axes:
        attend = make_context_parallel_attention(
            context,
            kernel,
            placement.sequence_axes,
            window=window,
            soft_cap=soft_cap,
            in_ring_order=context.has_ring_order(implementation),
            axis_steps=placement.axis_steps,
        )
    else:
        attend = partial(kernel.attend, window=window, soft_cap=soft_cap)
    if not placement.automatic_axes:
        return attend
    q_spec = placement.spec("batch", None, "heads", None)
    kv_spec = placement.spec("batch", None, kv_axis, None)
    ids_spec, heads_spec = placement.spec("batch", None), placement.spec("heads")
    specs = Inputs._make([q_spec, kv_spec, kv_spec, ids_spec, heads_spec])
    out_specs = Attended(q_spec, heads_spec)  # pyright: ignore[reportArgumentType]
    return placement.map_shards(attend, in_specs=(specs,), out_specs=out_specs)
