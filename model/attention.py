"""Causal attention inside documents: one function, three kernels.

`xla` runs anywhere and holds [B, N, T, S] scores. `cudnn` is NVIDIA's fused kernel,
reached through `jax.nn.dot_product_attention`; documents cost it a [B, 1, T, S] mask
that a row of one document does not pay. `splash` is jax's own Pallas kernel for TPU; it
never holds scores and skips blocks above the diagonal. None falls back to another: what
a kernel cannot do is an error.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, G = N/K,
H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.axes import ANYWHERE, AxisRules
from model.config import Attention
from model.linear import product
from model.remat import named

_SPLASH_LANES = 128  # splash works on blocks of 128 positions


class KeysValues(NamedTuple):
    """Keys and values seen so far, [B, S, K, H] each, and how many of S are."""

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]
    length: Int[Array, "*L"]

    def append(
        self, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
    ) -> "KeysValues":
        """Write T more positions behind the ones that are there."""
        at = (0, self.length, 0, 0)
        return KeysValues(
            jax.lax.dynamic_update_slice(self.keys, k_BTKH, at),
            jax.lax.dynamic_update_slice(self.values, v_BTKH, at),
            self.length + k_BTKH.shape[1],
        )


def why_not(
    implementation: Attention, platform: str, sequence_length: int, head_dim: int
) -> str | None:
    """Return why a kernel cannot be used here, or None where it can."""
    if implementation is Attention.cudnn:
        if platform not in ("cuda", "gpu"):
            return "cudnn attention needs an NVIDIA GPU"
        if head_dim % 8 or head_dim > 256:
            return "cudnn attention needs a head dim that is a multiple of 8, up to 256"
        if sequence_length % 2:
            return "cudnn attention needs an even sequence length"
    if implementation is Attention.splash:
        if platform != "tpu":
            return "splash attention needs a TPU"
        if sequence_length % _SPLASH_LANES:
            return "splash attention needs a sequence length divisible by 128"
    return None


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
    reason = why_not(kernel, platform, sequence_length, head_dim)
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

    Returns:
        [B, T, N, H] in q's dtype.
    """
    if implementation is Attention.xla:
        mask_BTS = _mask(q_BTNH.shape[1], segment_ids_BT)
        o_BTNH = _xla(q_BTNH, k_BSKH, v_BSKH, mask_BTS, compute)
        return named(o_BTNH, "attention")
    dtype = q_BTNH.dtype
    q, k, v = (x.astype(compute) for x in (q_BTNH, k_BSKH, v_BSKH))
    kernel = _cudnn if implementation is Attention.cudnn else _splash
    if rules.activations:  # XLA cannot partition a kernel by itself
        q_spec = rules.spec("batch", None, "heads", None)
        kv_spec = rules.spec("batch", None, "kv_heads", None)
        kernel = jax.shard_map(
            kernel,
            in_specs=(q_spec, kv_spec, kv_spec, rules.spec("batch", None)),
            out_specs=q_spec,
            check_vma=False,
        )
    return kernel(q, k, v, segment_ids_BT).astype(dtype)


def cached_attention(
    q_BTNH: Float[Array, "B T N H"],
    cache: KeysValues,
    compute: DTypeLike,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attend from the newest T positions of a cache to what it holds before them.

    With a window each sees itself and the window - 1 before it: as far as a model
    was trained to look.
    """
    T, S = q_BTNH.shape[1], cache.keys.shape[1]
    newest_T = cache.length - T + jnp.arange(T)
    behind_TS = newest_T[:, None] - jnp.arange(S)[None]
    mask_BTS = ((behind_TS >= 0) & (behind_TS < (window or S)))[None]
    return _xla(q_BTNH, cache.keys, cache.values, mask_BTS, compute)


def _mask(T: int, segment_ids_BT: Int[Array, "B T"] | None) -> Bool[Array, "_ T T"]:
    causal_BTS = jnp.tril(jnp.ones((T, T), bool))[None]
    if segment_ids_BT is None:
        return causal_BTS
    return causal_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])


def _xla(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "_ T S"],
    compute: DTypeLike,
) -> Float[Array, "B T N H"]:
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    scores_BKGTS = product("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, compute)
    scores_BKGTS = scores_BKGTS.astype(jnp.float32)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTNH.dtype)
    o_BTKGH = product("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH, compute)
    return o_BTKGH.reshape(B, T, N, H)


def _cudnn(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Run NVIDIA's kernel on a device's own rows and heads."""
    same = None
    if segment_ids_BT is not None:
        same = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])[:, None]
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=same, is_causal=True, implementation="cudnn"
    )


def _splash(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Run the Pallas kernel on a device's own rows and heads."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    T, N, H = q_BTNH.shape[1:]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(q_BTNH.shape[:2], jnp.int32)
    heads = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    kernel = splash.make_splash_mha(
        heads,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(T),
        residual_checkpoint_name="attention",
    )

    def row(q_NTH, k_KSH, v_KSH, segments_T):
        ids = splash.SegmentIds(segments_T, segments_T)
        return kernel(q_NTH, k_KSH, v_KSH, segment_ids=ids)

    q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
    out = jax.vmap(row)(q, k, v, segment_ids_BT)
    assert isinstance(out, jax.Array)  # no residuals asked for
    return out.swapaxes(1, 2)


def _block_sizes(T: int):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    # Wider blocks amortise the grid, narrower ones skip more above the diagonal. v5e,
    # v5p and v6e hold up to 1024 in vector memory with head dims up to 256; 2048 is too
    # much for v5e and v5p (checked by compiling). Which is fastest was not measured.
    block = next(size for size in (512, 384, 256, 128) if T % size == 0)
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
