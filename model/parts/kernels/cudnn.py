"""Attention by NVIDIA's fused kernel.

The kernel knows no sinks. A sink only reduces the weights of the keys, so the output is
that of the kernel times sigmoid(lse - sink). The kernel's backward pass takes the
log-sum-exp that includes the sink, and then computes the gradients of the reduced
weights.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from model.attention.inputs import Attended, Inputs, Result, score_bound, sinks_gradient
from model.choices import Attention
from model.parts.kernels import compat
from model.remat import saveable

LENGTH_MULTIPLE = 2  # The number of positions must be even.
SCALES_QUERIES = True
forward = compat.cudnn_step_forward
backward = compat.cudnn_step_backward


def value_padding(kernel: Attention, head_dim: int, value_dim: int) -> int:
    """Return how many zeros must follow each value vector for a kernel.

    cuDNN takes values of 128 dims with keys of 192 dims (Hopper or later), otherwise
    equal dims. On Blackwell, its backward pass takes no values of 192 dims.
    `cudnn_packed` needs equal dims, because the offsets of keys and values are the
    same.

    Source: NVIDIA/cudnn-frontend, docs/operations/Attention.md (the support matrix).
    """
    if kernel is Attention.cudnn and (head_dim, value_dim) == (192, 128):
        return 0
    return head_dim - value_dim if kernel.is_cudnn else 0


def attend(
    inputs: Inputs, *, window: int | None = None, soft_cap: float | None = None
) -> Attended:
    """Run NVIDIA's kernel on local rows and heads.

    The kernel's causal mask assumes as many queries as keys. If there are fewer
    queries, zeros are prepended to them, and the outputs of the zeros are removed.
    """
    assert soft_cap is None, "choose_kernel refuses this"
    q_BTNH, k_BSKH, v_BSKV, ids_BS, sinks_N = inputs
    padding = k_BSKH.shape[1] - q_BTNH.shape[1]
    if padding:
        q_BTNH = jnp.pad(q_BTNH, ((0, 0), (padding, 0), (0, 0), (0, 0)))
    mask = None
    if ids_BS is not None:
        mask = (ids_BS[:, :, None] == ids_BS[:, None])[:, None]
    if mask is None and sinks_N is None:
        result: Any = compat.cudnn_attend(q_BTNH, k_BSKH, v_BSKV, None, window)
    else:
        operands = Inputs(q_BTNH, k_BSKH, v_BSKV, sinks_N=sinks_N)
        result = _attend(operands, mask, window)
    o_BTNV, lse_BNT = result
    return Attended(o_BTNV[:, padding:], score_bound(lse_BNT[:, :, padding:]))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(
    inputs: Inputs, mask_B1TS: Bool[Array, "B 1 T S"] | None, window: int | None
) -> tuple[Array, Array]:
    """Return the output and the log-sum-exps, which have no gradient.

    The derivative of jax's function would also write the gradient of the mask, another
    [B, 1, T, S] array in each layer, which nothing reads (jax#34685).
    """
    return _forward(inputs, mask_B1TS, window)[0]


def _forward(inputs: Inputs, mask_B1TS, window: int | None):
    q, k, v, _, sinks_N = inputs
    o_BTNV, lse_BNT = compat.cudnn_attend(q, k, v, mask_B1TS, window)
    if sinks_N is not None:
        total_BNT = jnp.logaddexp(lse_BNT, sinks_N.astype(jnp.float32)[:, None])
        share_BTN = jnp.exp(lse_BNT - total_BNT).swapaxes(1, 2)
        o_BTNV = (o_BTNV * share_BTN[..., None]).astype(q.dtype)
        lse_BNT = total_BNT
    o_BTNV = saveable(o_BTNV, "attention")
    lse_BNT = saveable(lse_BNT, "attention")
    return (o_BTNV, lse_BNT), (inputs, mask_B1TS, o_BTNV, lse_BNT)


def _backward(window: int | None, residuals, cotangents):
    inputs, mask_B1TS, o_BTNV, lse_BNT = residuals
    do_BTNV, _ = cotangents
    dq, dk, dv = compat.cudnn_backward(
        inputs, mask_B1TS, window, o_BTNV=o_BTNV, lse_BNT=lse_BNT, do_BTNV=do_BTNV
    )
    dsinks_N = None
    if inputs.sinks_N is not None:
        result = Result(o_BTNV.swapaxes(1, 2), lse_BNT)
        dsinks_N = sinks_gradient(inputs.sinks_N, result, do_BTNV.swapaxes(1, 2))
    return Inputs(dq, dk, dv, None, dsinks_N), None


_attend.defvjp(_forward, _backward)
