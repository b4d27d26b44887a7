"""jax's own Pallas kernel for TPU.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LANES = 128  # blocks are of so many positions


def why_not(platform: str, sequence_length: int, head_dim: int) -> str | None:
    """Return why the kernel cannot be used, or None where it can."""
    del head_dim  # any
    if platform != "tpu":
        return "splash attention needs a TPU"
    if sequence_length % _LANES:
        return "splash attention needs a sequence length divisible by 128"
    return None


def attend(
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
