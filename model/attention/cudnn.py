"""NVIDIA's fused attention, reached through `jax.nn.dot_product_attention`.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import jax
from jaxtyping import Array, Float, Int


def why_not(platform: str, sequence_length: int, head_dim: int) -> str | None:
    """Return why the kernel cannot be used, or None where it can."""
    if platform not in ("cuda", "gpu"):
        return "cudnn attention needs an NVIDIA GPU"
    if head_dim % 8 or head_dim > 256:
        return "cudnn attention needs a head dim that is a multiple of 8, up to 256"
    if sequence_length % 2:
        return "cudnn attention needs an even sequence length"
    return None


def attend(
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
