"""Causal attention inside documents: one function, three kernels.

`xla` runs anywhere and holds [B, N, T, S] scores. `cudnn` is NVIDIA's fused kernel;
documents cost it a [B, 1, T, S] mask that a row of one document does not pay. `splash`
is jax's own Pallas kernel for TPU; it never holds scores and skips blocks above the
diagonal. None falls back to another: what a kernel cannot do is an error.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from model.attention import across, xla
from model.attention.across import KERNELS
from model.axes import ANYWHERE, AxisRules
from model.choices import Attention, ContextAttention
from model.remat import named


def choose(
    asked: Attention, platform: str, sequence_length: int, head_dim: int
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
        reason = KERNELS[kernel].why_not(platform, sequence_length, head_dim)
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

    Returns:
        [B, T, N, H] in q's dtype.
    """
    if implementation is Attention.xla and not rules.sequence:
        mask_BTS = xla.mask(q_BTNH.shape[1], segment_ids_BT)
        o_BTNH = xla.attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, compute)
        return named(o_BTNH, "attention")
    dtype = q_BTNH.dtype
    q, k, v = (x.astype(compute) for x in (q_BTNH, k_BSKH, v_BSKH))
    kernel = KERNELS[implementation]
    if rules.sequence:
        attend = across.attend(context, kernel, rules.sequence)
    else:
        assert kernel is not xla
        attend = kernel.attend
    if rules.activations:  # XLA cannot partition a kernel by itself
        q_spec = rules.spec("batch", None, "heads", None)
        kv_spec = rules.spec("batch", None, "kv_heads", None)
        attend = jax.shard_map(
            attend,
            in_specs=(q_spec, kv_spec, kv_spec, rules.spec("batch", None)),
            out_specs=q_spec,
            check_vma=False,
        )
    return attend(q, k, v, segment_ids_BT).astype(dtype)
