"""Attention by NVIDIA's fused kernel, through `jax.nn.dot_product_attention`.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Float, Int

from model.attention.ring import Documents, Result

MULTIPLE = 2  # The number of positions must be even.
# Parameters of both of jax's primitives. Those of jax 0.12 can also modify scores.
PARAMETERS: dict[str, Any] = {"seed": 42, "dropout_rate": 0.0}
if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:
    PARAMETERS |= {"score_mod_name": None, "score_mod_jaxpr": None}


def why_not(
    platform: str, sequence_length: int, head_dim: int, soft_cap: bool, sinks: bool
) -> str | None:
    """Return why the kernel cannot be used, or None if it can."""
    if platform not in ("cuda", "gpu"):
        return "cudnn attention needs an NVIDIA GPU"
    if head_dim % 8 or head_dim > 256:
        return "cudnn attention needs a head dim that is a multiple of 8, up to 256"
    if sequence_length % MULTIPLE:
        return "cudnn attention needs an even sequence length"
    if soft_cap:
        return "cudnn attention does not cap scores (model.attention_soft_cap)"
    if sinks:
        return "cudnn attention has no sinks (model.attention_sinks)"
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
) -> Float[Array, "B T N H"]:
    """Run NVIDIA's kernel on local rows and heads.

    Queries are the last T of S positions. The kernel's causal mask assumes that there
    are as many queries as keys, so that queries of zeros are added before the others.
    """
    assert (sinks_N, soft_cap) == (None, None), "why_not refuses these"
    padding = k_BSKH.shape[1] - q_BTNH.shape[1]
    if padding:
        q_BTNH = jnp.pad(q_BTNH, ((0, 0), (padding, 0), (0, 0), (0, 0)))
    ids = segment_ids_BS
    mask = _document_mask(None if ids is None else (ids, ids))
    o_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask,
        is_causal=True,  # Without it, a window also sees later keys (jax#39576).
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return o_BTNH[:, padding:]


def forward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Compute one step of a ring (model/attention/ring.py).

    `jax.nn` rounds the log-sum-exp, and its derivative ignores the cotangent of it.
    Therefore this function and `backward` call private functions of jax.
    """
    results: Any = fused.dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        mask=_document_mask(documents),
        mask_type=_mask_type(causal),
        qkv_layout="BNTH",
        return_residual=True,
    )
    return results  # The log-sum-exp is float32.


def backward(
    q_BNTH: Float[Array, "B N T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    documents: Documents,
    causal: bool,
    result: Result,
    do_BNTH: Float[Array, "B N T H"],
) -> tuple[Array, Array, Array]:
    """Compute one step of a ring's backward pass."""
    none = jnp.zeros(0, q_BNTH.dtype)
    mask = _document_mask(documents)
    bias = none if mask is None else fused.combine_bias_and_mask(None, mask, none.dtype)
    dq, dk, dv = fused._dot_product_attention_bwd_p.bind(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        bias,
        *[none] * 6,
        result.lse_BNT,
        result.o_BNTH,
        do_BNTH,
        **PARAMETERS,
        scale=1.0,
        variadic_args=(mask is not None, False),  # A bias, without its gradient.
        mask_type=_mask_type(causal),
        layout=fused.AttentionLayout.BNTH.value,
        sliding_window_length=None,
    )
    return dq, dk, dv


def _document_mask(documents: Documents) -> Bool[Array, "B 1 T S"] | None:
    """Return true for each query and key of one document, or None if rows are whole."""
    if documents is None:
        return None
    return (documents[0][:, :, None] == documents[1][:, None])[:, None]


def _mask_type(causal: bool) -> fused.MaskType:
    return fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
