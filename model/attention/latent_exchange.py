"""Exchange latents, not keys and values, between devices that share rows.

The keys and values of N heads are N (H + V) numbers for each position, and their latent
is C numbers, which every head shares.

- `ring` sends latents, and each device expands them in each step to keys and values of
  its chunk. A device thus expands the positions of the whole row, but never holds more
  keys and values than those of a chunk (model/attention/ring.py).
- `ulysses` gathers latents, and each device expands them for those heads for which it
  attends to whole rows.

`all_gather` expands gathered latents for all heads (model/attention/latent.py).

Shapes: B batch, T local positions, S positions of a row, N local heads, C latent dim, R
`kv_rank`, H dim of queries and keys, V value dim, E nope_dim + V.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention.context_parallel import (
    KERNELS,
    gather_positions,
    make_context_parallel_attention,
)
from model.attention.inputs import Inputs
from model.attention.ring import Kernel, Travelling, ring
from model.choices import ContextAttention
from model.execution import Execution
from model.linear import product
from model.remat import saveable
from model.scopes import part_scope


def attend_to_latents(
    q_BTNH: Float[Array, "B T N H"],
    latent_BTC: Float[Array, "B T C"],
    weight_RNE: Float[Array, "R N E"],
    segment_ids_BT: Int[Array, "B T"] | None,
    *,
    nope_dim: int,
    execution: Execution,
) -> Float[Array, "B T N V"]:
    """Attend from local positions to whole rows by `ring` or `ulysses`.

    The result has the dtype of the queries, which the caller scales for `splash`.
    `weight_RNE` is gathered over manual axes. It expands the first R dims of a latent
    to the keys and values of a head; the other dims are the end of each head's key.
    """
    placement, compute = execution.placement, execution.numerics.compute_dtype
    axes, kernel = placement.sequence_axes, KERNELS[execution.attention]
    V = weight_RNE.shape[-1] - nope_dim
    # The kernel of cuDNN takes a single dim.
    padding = q_BTNH.shape[-1] - V if execution.attention.is_cudnn else 0
    expand = partial(_expand, nope_dim, padding)

    def attend_in_ring(q, latent, weight, ids) -> Array:
        ring_kernel = Kernel(kernel.forward, kernel.backward, expand)
        scaled_q = q * q.shape[-1] ** -0.5 if kernel.SCALES_QUERIES else q
        local = Travelling((latent[:, None],), ids)
        q_BNTH = scaled_q.swapaxes(1, 2)
        o_BNTV: Any = ring(ring_kernel, axes, q_BNTH, local, None, weight)
        return o_BNTV.swapaxes(1, 2)

    def attend_by_heads(q, latent, weight, ids) -> Array:
        num_heads = weight.shape[1] // jax.lax.psum(1, axes)
        first_head = num_heads * jax.lax.axis_index(axes)
        weight = jax.lax.dynamic_slice_in_dim(weight, first_head, num_heads, axis=1)
        latent = gather_positions(latent, axes)
        k, v = (x.swapaxes(1, 2) for x in expand(weight, latent[:, None]))
        k, v = saveable(k, "key"), saveable(v, "value")
        exchange_and_attend = make_context_parallel_attention(
            ContextAttention.ulysses, kernel, axes, window=None, soft_cap=None
        )
        return exchange_and_attend(Inputs(q, k, v, ids))

    is_ring = execution.context_attention is ContextAttention.ring
    attend = attend_in_ring if is_ring else attend_by_heads
    if placement.automatic_axes:
        spec = placement.spec
        q_spec = spec("batch", None, "heads", None)
        weight_spec = spec(None, "heads", None)
        in_specs = (q_spec, spec("batch", None, None), weight_spec, spec("batch", None))
        attend = placement.map_shards(attend, in_specs=in_specs, out_specs=q_spec)
    q, latent = q_BTNH.astype(compute), latent_BTC.astype(compute)
    return attend(q, latent, weight_RNE, segment_ids_BT)[..., :V].astype(q_BTNH.dtype)


def _expand(
    nope_dim: int, padding: int, weight_RNE: Array, latent_B1TC: Array
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T _"]]:
    """Return the keys and values of latents; `padding` zeros follow the values."""
    rank = weight_RNE.shape[0]
    c_BTR, k_rope = jnp.split(latent_B1TC[:, 0], [rank], axis=-1)
    with part_scope("key_value_up"):
        kv = product("btr,rne->bnte", c_BTR, weight_RNE, c_BTR.dtype)
    k_nope, v_BNTV = jnp.split(kv, [nope_dim], axis=-1)
    shape = *k_nope.shape[:3], k_rope.shape[-1]
    k_BNTH = jnp.concatenate(
        [k_nope, jnp.broadcast_to(k_rope[:, None], shape)], axis=-1
    )
    return k_BNTH, jnp.pad(v_BNTV, ((0, 0), (0, 0), (0, 0), (0, padding)))
