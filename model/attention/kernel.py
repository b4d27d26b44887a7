"""Causal attention inside documents: one function, three kernels.

`xla` runs anywhere and holds [B, N, T, S] scores. `cudnn` is NVIDIA's fused kernel;
documents cost it a [B, 1, T, S] mask that a row of one document does not pay. `splash`
is jax's own Pallas kernel for TPU; it never holds scores and skips blocks above the
diagonal. None falls back to another: what a kernel cannot do is an error.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from model.attention import across, masks, xla
from model.attention.across import KERNELS
from model.attention.masks import Local
from model.axes import ANYWHERE, AxisRules
from model.choices import Attention, ContextAttention
from model.parts import in_branch


def choose(
    asked: Attention,
    platform: str,
    sequence_length: int,
    head_dim: int,
    *,
    soft_cap: bool = False,
    sinks: bool = False,
    dropout: bool = False,
) -> Attention:
    """Choose the kernel: the one asked for, or with `auto` the platform's own.

    Raises:
        ValueError: if the kernel cannot serve. `auto` does not silently take a slower
            one than the platform's own either.
    """
    best = {"tpu": Attention.splash, "cuda": Attention.cudnn, "gpu": Attention.cudnn}
    kernel = best.get(platform, Attention.xla) if asked is Attention.auto else asked
    reason = None
    if kernel is not Attention.xla:
        of = platform, sequence_length, head_dim, soft_cap, sinks
        reason = KERNELS[kernel].why_not(*of)
        if dropout:
            reason = f"{kernel} attention drops no weights (model.dropout.attention)"
    if reason:
        raise ValueError(f"{reason}; change it, or take model.attention=xla (slower)")
    return kernel


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    *,
    implementation: Attention,
    compute: DTypeLike,
    rules: AxisRules = ANYWHERE,
    context: ContextAttention = ContextAttention.ring,
    drop: xla.Drop | None = None,
    window: int | None = None,
    local: Local | None = None,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend from each position to itself and those before it in its document.

    Args:
        q_BTNH: queries.
        k_BSKH: keys, S = T.
        v_BSKH: values.
        segment_ids_BT: int32 document of each position; None: one document a row.
        implementation: the kernel; not `auto`.
        compute: dtype of the products' operands.
        rules: where activations lie; kernels work shard by shard.
        context: how devices that share rows attend to each other's keys; not `auto`.
        drop: leaves out weights at random; only of `xla`, where no row is shared.
        window: how many keys a query sees at most, itself included; None: all.
        local: whether the window holds here, where that is known only as it runs.
        soft_cap: c of c tanh(score / c); None: scores are as they are.
        sinks_N: a score of each head that takes weight and gives nothing.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    T, alone = q_BTNH.shape[1], not rules.sequence
    if window is not None and window >= T * jax.lax.psum(1, rules.sequence):
        window = None
    if implementation is Attention.xla and alone:
        mask_BTS = masks.causal(T, segment_ids_BT, masks.reach(window, local, T))
        more = compute, soft_cap, sinks_N, drop
        return xla.attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, *more, causal=True)
    assert drop is None, "settled by train/execution"
    dtype, kernel = q_BTNH.dtype, KERNELS[implementation]
    q, k, v = (x.astype(compute) for x in (q_BTNH, k_BSKH, v_BSKH))
    kv_axis = "kv_heads"
    if rules.spec("heads") != rules.spec("kv_heads"):
        # A device's keys would not be those of its queries' groups: one for each query.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        kv_axis = "heads"

    def attend(window: int | None) -> Callable[..., Array]:
        if alone:
            assert kernel is not xla
            own = partial(kernel.attend, window=window, soft_cap=soft_cap)
        else:
            own = across.attend(context, kernel, rules.sequence, window, soft_cap)
        return _on_shards(own, rules, kv_axis)

    arguments = q, k, v, segment_ids_BT, sinks_N
    if window is None or local is None:
        return attend(window)(*arguments).astype(dtype)

    # A kernel's mask is fixed as it is compiled: one for each kind of layer.
    kinds = (
        in_branch(attend(window), local.times, local.of),
        in_branch(attend(None), local.of - local.times, local.of),
    )
    return jax.lax.cond(local.flag, *kinds, *arguments).astype(dtype)


def _on_shards(
    own: Callable[..., Array], rules: AxisRules, kv_axis: str
) -> Callable[..., Array]:
    """Run a kernel shard by shard: XLA cannot partition it by itself."""
    if not rules.activations:
        return own
    q_spec = rules.spec("batch", None, "heads", None)
    kv_spec = rules.spec("batch", None, kv_axis, None)
    ids_spec, sinks_spec = rules.spec("batch", None), rules.spec("heads")
    return jax.shard_map(
        own,
        in_specs=(q_spec, kv_spec, kv_spec, ids_spec, sinks_spec),
        out_specs=q_spec,
        check_vma=False,
    )
