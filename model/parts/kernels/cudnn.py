"""Attention by NVIDIA's fused kernel.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim.
"""

import jax.numpy as jnp

from model.attention.inputs import Attended, Inputs, score_bound
from model.parts.kernels import compat

LENGTH_MULTIPLE = 2  # The number of positions must be even.
SCALES_QUERIES = True
forward = compat.cudnn_step_forward
backward = compat.cudnn_step_backward


def attend(
    inputs: Inputs, *, window: int | None = None, soft_cap: float | None = None
) -> Attended:
    """Run NVIDIA's kernel on local rows and heads.

    The kernel's causal mask assumes as many queries as keys. If there are fewer
    queries, zeros are prepended to them, and the outputs of the zeros are removed.
    """
    assert (inputs.sinks_N, soft_cap) == (None, None), "choose_kernel refuses these"
    q_BTNH, k_BSKH, v_BSKH, ids_BS, _ = inputs
    padding = k_BSKH.shape[1] - q_BTNH.shape[1]
    if padding:
        q_BTNH = jnp.pad(q_BTNH, ((0, 0), (padding, 0), (0, 0), (0, 0)))
    mask = None
    if ids_BS is not None:
        mask = (ids_BS[:, :, None] == ids_BS[:, None])[:, None]
    o_BTNH, lse_BNT = compat.cudnn_attend(q_BTNH, k_BSKH, v_BSKH, mask, window)
    return Attended(o_BTNH[:, padding:], score_bound(lse_BNT[:, :, padding:]))
