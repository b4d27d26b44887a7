"""Private functions of JAX for attention, checked with jax 0.10.2 and 0.12.0.

This module binds cuDNN's primitives instead of calling
`jax.nn.dot_product_attention`. That function rounds the log-sum-exp, and the function's
derivative ignores the log-sum-exp's cotangent. In jax 0.10.2 (not in later versions),
the function also multiplies the offsets of packed keys by the number of query heads,
even if there are fewer key heads. The public derivative of jax's TPU kernel ("splash")
does not accept a log-sum-exp that includes other keys, which a step of a ring needs.

Source: jax/_src/cudnn/fused_attention_stablehlo.py (the meaning of the operands).
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused

from model.attention.inputs import Chunks, Inputs, Result


def cudnn_attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    mask: jax.Array | None,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Return causal attention, and its float32 log-sum-exps [B, N, T] without gradient.

    `mask`, if given, is [B, 1, T, S]. A query sees at most `window` keys.
    """
    result: Any = fused.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        mask=mask,
        scale=q_BTNH.shape[-1] ** -0.5,
        # Otherwise, a window also includes later keys (jax#39576).
        mask_type=fused.MaskType.CAUSAL,
        sliding_window_length=window,
        return_residual=True,
    )
    return result


def cudnn_backward(
    inputs: Inputs,
    mask_B1TS: jax.Array | None,
    window: int | None,
    *,
    o_BTNV: jax.Array,
    lse_BNT: jax.Array,
    do_BTNV: jax.Array,
) -> Sequence[jax.Array]:
    """Return the gradients of q, k and v of `cudnn_attend`.

    The log-sum-exps may include scores other than those of the keys.
    """
    q = inputs.q_BTNH
    scale = q.shape[-1] ** -0.5
    return _backward(
        (q, inputs.k_BSKH, inputs.v_BSKV),
        mask_B1TS,
        (lse_BNT, o_BTNV, do_BTNV),
        _parameters(fused.MaskType.CAUSAL, fused.AttentionLayout.BTNH, scale),
        window,
    )


def cudnn_step_forward(chunks: Chunks, causal: bool) -> Result:
    """Return the output and the float32 log-sum-exp of one step of a ring."""
    result: Any = fused.dot_product_attention(
        chunks.q_BNTH,
        chunks.k_BKSH,
        chunks.v_BKSV,
        mask=_mask(chunks),
        mask_type=_mask_type(causal),
        qkv_layout="BNTH",
        return_residual=True,
    )
    return Result._make(result)


def cudnn_step_backward(
    chunks: Chunks, causal: bool, result: Result, do_BNTV: jax.Array
) -> Sequence[jax.Array]:
    """Return the gradients of q, k and v from one step of a ring."""
    return _backward(
        chunks[:3],
        _mask(chunks),
        (result.lse_BNT, result.o_BNTV, do_BNTV),
        _parameters(_mask_type(causal), fused.AttentionLayout.BNTH, 1.0),
        None,
    )


def _backward(
    operands: Sequence[jax.Array],
    mask: jax.Array | None,
    results: Sequence[jax.Array],
    parameters: dict[str, Any],
    window: int | None,
) -> Sequence[jax.Array]:
    """Return the gradients of the operands q, k and v.

    `results` are the log-sum-exps, the output and its cotangent.
    """
    empty = jnp.zeros(0, operands[0].dtype)
    bias = empty
    if mask is not None:
        bias = fused.combine_bias_and_mask(None, mask, empty.dtype)
    return fused._dot_product_attention_bwd_p.bind(
        *operands,
        bias,
        *[empty] * 6,
        *results,
        **parameters,
        variadic_args=(mask is not None, False),  # (has a bias, has its gradient)
        sliding_window_length=window,
    )


def _mask(chunks: Chunks) -> jax.Array | None:
    same_BTS = chunks.same_document_BTS
    return None if same_BTS is None else same_BTS[:, None]


def _mask_type(causal: bool) -> fused.MaskType:
    return fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK


def _parameters(
    mask_type: fused.MaskType, layout: fused.AttentionLayout, scale: float
) -> dict[str, Any]:
    """Return the parameters of both primitives. In jax 0.12, `score_mod` adds two."""
    parameters = {"seed": 42, "dropout_rate": 0.0, "scale": scale}
    if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:
        parameters |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return parameters | {"mask_type": mask_type, "layout": layout.value}


class PackedCall:
    """A call of cuDNN's kernel for packed documents, forward and backward.

    Arrays are [B, T, heads, H]. `lengths_and_offsets` describes the documents
    (`Documents.operands` in model/parts/kernels/cudnn_packed.py).
    """

    def __init__(
        self,
        inputs: Inputs,
        lengths_and_offsets: Sequence[jax.Array],
        window: int | None,
    ):
        """Check the layout, and collect the operands."""
        q = inputs.q_BTNH
        k = inputs.k_BSKH
        v = inputs.v_BSKV
        layout = fused.AttentionLayout.BTNH
        empty = jnp.zeros(0, q.dtype)
        absent: list[Any] = [None] * 7  # No bias, lengths, offsets or pages.
        fused.check_layout(*[q, k, v, *absent, layout])
        self._operands = [q, k, v, empty, *lengths_and_offsets, empty, empty]
        self._parameters = {
            **_parameters(fused.MaskType.PADDING_CAUSAL, layout, q.shape[-1] ** -0.5),
            "variadic_args": (False, False),  # No bias, and no gradient of a bias.
            "sliding_window_length": window,
        }

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """Return outputs [B, T, N, H] and log-sum-exps [documents, N, T]."""
        bind = fused._dot_product_attention_fwd_p.bind
        o_BTNH, lse_DNT = bind(*self._operands, **self._parameters, is_training=True)
        return o_BTNH, lse_DNT

    def backward(
        self, lse_DNT: jax.Array, o_BTNH: jax.Array, do_BTNH: jax.Array
    ) -> Sequence[jax.Array]:
        """Return the gradients of q, k and v."""
        bind = fused._dot_product_attention_bwd_p.bind
        return bind(*self._operands, lse_DNT, o_BTNH, do_BTNH, **self._parameters)


def splash_library() -> tuple[Any, Any]:
    """Return the modules of jax's TPU kernel and of its masks, imported on demand."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    return splash_attention_kernel, splash_attention_mask


def splash_with_blocks(kernel: Any, seen_QS: jax.Array, size: int) -> Any:
    """Return a kernel that computes only the blocks of scores that queries see.

    The kernel was made for a full mask. seen_QS says for each block of `size` queries
    and each block of `size` keys whether queries see no keys (0), those up to the
    diagonal (1), or all keys (2). It may depend on the device.

    Source: MaskInfo in splash_attention_mask_info.py.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask_info as infos,
    )

    def next_blocks(seen: jax.Array) -> jax.Array:
        """Return the column of the next block to compute, in the order of rows."""
        order = jnp.arange(seen.size)
        later = jnp.where(seen.reshape(-1) > 0, order, seen.size)
        following = jax.lax.cummin(later, reverse=True)
        following = jnp.where(following < seen.size, following, following[0])
        return (following % seen.shape[1]).reshape(seen.shape)

    triangle = np.tri(size, dtype=bool)[None]

    def info(data_next: jax.Array, partial_blocks: np.ndarray) -> Any:
        return infos.MaskInfo(
            data_next=data_next[None].astype(jnp.int32),
            mask_next=jnp.zeros((1, *seen_QS.shape), jnp.int8),
            block_mask=seen_QS[None].astype(jnp.int8),
            partial_mask_blocks=jnp.asarray(partial_blocks),
            q_sequence=None,
        )

    by_query = info(next_blocks(seen_QS), triangle)
    # The kernel of dk and dv goes through the queries of each block of keys.
    by_key = info(next_blocks(seen_QS.T).T, triangle.swapaxes(1, 2))
    return type(kernel)(by_query, by_query, by_key, **kernel.kwargs)


def _splash_ids(chunks: Chunks) -> Any:
    splash, _ = splash_library()
    if chunks.documents is None:
        return None
    queries_T, keys_S = chunks.documents
    return splash.SegmentIds(q=queries_T, kv=keys_S)


def splash_forward(
    kernel: Any, chunks: Chunks, sinks_N: jax.Array | None = None
) -> Result:
    """Return the result of the kernel for one row, without a batch dim."""
    splash, _ = splash_library()
    o_NTV, (lse_NT,) = splash._splash_attention_forward(
        kernel.fwd_mask_info,
        q=chunks.q_BNTH,
        k=chunks.k_BKSH,
        v=chunks.v_BKSV,
        segment_ids=_splash_ids(chunks),
        sinks=sinks_N,
        **kernel.kwargs,
    )
    return Result(o_NTV, lse_NT)


def splash_backward(
    kernel: Any,
    chunks: Chunks,
    result: Result,
    do_NTV: jax.Array,
    sinks_N: jax.Array | None = None,
) -> Sequence[Any]:
    """Return the gradients of q, k, v and sinks for one row; None without sinks."""
    splash, _ = splash_library()
    residuals = (
        *(chunks.q_BNTH, chunks.k_BKSH, chunks.v_BKSV, _splash_ids(chunks), sinks_N),
        *(result.o_BNTV, result.lse_BNT, kernel.dq_mask_info, kernel.dkv_mask_info),
    )
    grads = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=do_NTV)
    return *grads[3:6], grads[7]
