"""A ring in which latents travel, and devices expand them to keys and values.

The keys and values of N heads have N (H + V) numbers for each position, and its latent,
which all heads share, has C. In each step a device expands the latents that it has
received for its local heads. It thus holds the keys and values of a chunk, but expands
all positions of the row. The backward pass expands them again. The gradients of latents
travel with them, and each device sums its gradient of the weight.

Shapes: B batch, T local positions, N heads, C latent dim, R `kv_rank`, H dim of queries
and keys, V value dim, E nope_dim + V.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention.inputs import Attended, score_bound
from model.execution import Execution
from model.parts.context.context_parallel import KERNELS
from model.parts.context.ring import ring
from model.parts.context.ring_kernel import Kernel, Travelling
from model.parts.kernels import cudnn
from model.products import product
from model.scopes import part_scope


def attend_in_latent_ring(
    q_BTNH: Float[Array, "B T N H"],
    latent_BTC: Float[Array, "B T C"],
    weight_RNE: Float[Array, "R N E"],
    segment_ids_BT: Int[Array, "B T"] | None,
    *,
    nope_dim: int,
    execution: Execution,
) -> Attended:
    """Attend from local positions to whole rows, in the dtype of the queries.

    The caller scales queries for `splash`. `weight_RNE` is gathered over manual axes.
    It expands the first R dims of a latent to the keys and values of each head. The
    other dims of the latent end the keys of all heads.
    """
    placement = execution.placement
    compute = execution.numerics.compute_dtype
    kernel = KERNELS[execution.attention.kernel]
    V = weight_RNE.shape[-1] - nope_dim
    padding = cudnn.value_padding(execution.attention.kernel, q_BTNH.shape[-1], V)
    expand = partial(_expand, nope_dim, padding)
    ring_kernel = Kernel(kernel.forward, kernel.backward, expand)

    def attend(q: Array, latent: Array, weight: Array, ids: Array | None) -> Attended:
        scaled_q = q * q.shape[-1] ** -0.5 if kernel.SCALES_QUERIES else q
        local = Travelling((latent[:, None],), ids)
        q_BNTH = scaled_q.swapaxes(1, 2)
        axes = placement.sequence_axes
        result: Any = ring(ring_kernel, axes, q_BNTH, local, weight=weight)
        return Attended(result.o_BNTV.swapaxes(1, 2), score_bound(result.lse_BNT))

    if placement.automatic_axes:
        spec = placement.spec
        q_spec = spec("batch", None, "heads", None)
        weight_spec = spec(None, "heads")
        in_specs = (q_spec, spec("batch"), weight_spec, spec("batch"))
        out_specs = Attended(q_spec, spec("heads"))  # pyright: ignore[reportArgumentType]
        attend = placement.map_shards(attend, in_specs=in_specs, out_specs=out_specs)
    q = q_BTNH.astype(compute)
    latent = latent_BTC.astype(compute)
    o_BTNV, bound_N = attend(q, latent, weight_RNE, segment_ids_BT)
    return Attended(o_BTNV[..., :V].astype(q_BTNH.dtype), bound_N)


def _expand(
    nope_dim: int, padding: int, weight_RNE: Array, arrays: Sequence[Array]
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T _"]]:
    """Return the keys and values of latents; `padding` zeros follow the values."""
    (latent_B1TC,) = arrays
    c_BTR, k_rope = jnp.split(latent_B1TC[:, 0], [weight_RNE.shape[0]], axis=-1)
    with part_scope("key_value_up"):
        kv = product("btr,rne->bnte", c_BTR, weight_RNE, c_BTR.dtype)
    k_nope, v_BNTV = jnp.split(kv, [nope_dim], axis=-1)
    shape = *k_nope.shape[:3], k_rope.shape[-1]
    k_rope = jnp.broadcast_to(k_rope[:, None], shape)
    v_BNTV = jnp.pad(v_BNTV, ((0, 0), (0, 0), (0, 0), (0, padding)))
    return jnp.concatenate([k_nope, k_rope], axis=-1), v_BNTV
