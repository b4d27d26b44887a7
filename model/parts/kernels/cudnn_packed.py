"""Attention over packed documents by NVIDIA's kernel, given the documents' offsets.

No [B, 1, T, T] mask is built, and the kernel skips pairs of positions in different
documents. One call of the kernel handles two documents of each row, and a loop calls
the kernel until all documents are done. More documents per call would need more memory:
XLA does not tell cuDNN the total number of positions, so the workspace of the backward
pass has one float32 array of the queries' size for each document of a call.

The kernel needs Hopper or later. A document is a contiguous run of one id: if the id
returns later in the row, another document begins.

Source: NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h (the workspace).

Shapes: B batch, T time, N query heads, K key/value heads, H head dim, C documents of a
row in one call, D = B C documents.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.attention.inputs import Attended, Inputs, score_bound
from model.parts.kernels import cudnn
from model.parts.kernels.compat import PackedCall
from model.remat import saveable

LENGTH_MULTIPLE = cudnn.LENGTH_MULTIPLE
SCALES_QUERIES = True
_DOCUMENTS_PER_CALL = 2  # The minimum for which cuDNN accepts offsets.


def attend(
    inputs: Inputs, *, window: int | None = None, soft_cap: float | None = None
) -> Attended:
    """Run the kernel on local rows and heads; without segment ids, run `cudnn`.

    Raises:
        ValueError: if the local queries have more elements than an int32 offset can
            count.
    """
    q_BTNH = inputs.q_BTNH
    ids_BT = inputs.segment_ids_BS
    if ids_BT is None:
        return cudnn.attend(inputs, window=window, soft_cap=soft_cap)
    assert (inputs.sinks_N, soft_cap) == (None, None), "choose_kernel refuses these"
    if q_BTNH.size >= 2**31:
        raise ValueError(
            f"cudnn_packed attention takes fewer than 2^31 elements of queries, but "
            f"these {len(q_BTNH)} rows have {q_BTNH.size:,}; take more microbatches "
            f"(train.accumulation_steps) or model.attention=cudnn"
        )
    starts_document = ids_BT[:, 1:] != ids_BT[:, :-1]
    indices_BT = jnp.cumsum(starts_document, axis=1, dtype=jnp.int32)
    padded_BT = jnp.pad(indices_BT, ((0, 0), (1, 0)))
    result: Any = _attend(inputs._replace(segment_ids_BS=padded_BT), window)
    o_BTNH, lse_BNT = result
    return Attended(o_BTNH, score_bound(lse_BNT))


class Documents(NamedTuple):
    """C documents of each row.

    starts_BC: each document's first position, or T if the row has fewer documents.
    lengths_BC: each document's length, or 0 if the row has fewer documents.
    """

    starts_BC: Int[Array, "B C"]
    lengths_BC: Int[Array, "B C"]

    def operands(self, T: int, sizes: tuple[int, int]) -> tuple[Array, ...]:
        """Return cuDNN's operands: lengths of queries and keys, and their offsets.

        Offsets count elements over all rows. First come the starts of the D documents,
        and then B times the end of the last row, because jax reads the number of
        documents from the shape [B, C + 1]. `sizes` has the number of elements of one
        position in the queries and in the keys.
        """
        B, C = self.starts_BC.shape
        starts = (self.starts_BC + T * jnp.arange(B, dtype=jnp.int32)[:, None]).ravel()
        starts = jnp.pad(starts, (0, B), constant_values=B * T).reshape(B, C + 1)
        return self.lengths_BC, self.lengths_BC, *(starts * size for size in sizes)

    def mask(self, T: int) -> Bool[Array, "B T"]:
        """Return the mask of the positions that belong to these documents."""
        start_B1 = self.starts_BC[:, :1]
        end_B1 = self._ends_BC[:, -1:]
        position_1T = jnp.arange(T)[None]
        return (position_1T >= start_B1) & (position_1T < end_B1)

    def to_rows(self, x_DNT: Float[Array, "D N T"]) -> Float[Array, "B N T"]:
        """Move values from positions in documents to positions in rows."""
        B, C = self.starts_BC.shape
        _, N, T = x_DNT.shape
        position_1T = jnp.arange(T)[None]
        index_BT = jnp.sum(position_1T[None] >= self._ends_BC[..., None], axis=1)
        index_BT = jnp.minimum(index_BT, C - 1)
        start_BT = jnp.take_along_axis(self.starts_BC, index_BT, axis=1)
        source_BT = index_BT * T + jnp.clip(position_1T - start_BT, 0, T - 1)
        x_BNCT = x_DNT.reshape(B, C, N, T).swapaxes(1, 2).reshape(B, N, C * T)
        return jnp.take_along_axis(x_BNCT, source_BT[:, None], axis=2)

    def to_documents(self, x_BNT: Float[Array, "B N T"]) -> Float[Array, "D N T"]:
        """Move values to positions in documents; after each end, they are arbitrary."""
        T = x_BNT.shape[2]
        source_BCT = self.starts_BC[..., None] + jnp.arange(T)[None, None]
        source_BCT = jnp.minimum(source_BCT, T - 1)
        x_BCNT = jnp.take_along_axis(x_BNT[:, None], source_BCT[:, :, None], axis=3)
        return x_BCNT.reshape(-1, *x_BNT.shape[1:])

    @property
    def _ends_BC(self) -> Array:
        return self.starts_BC + self.lengths_BC


def documents_of_call(indices_BT: Int[Array, "B T"], call: Array | int) -> Documents:
    """Return the documents that a call of the kernel handles; `call` counts from 0.

    indices_BT is the index of each position's document within its row.
    """
    index_in_call_B1T = indices_BT[:, None] - _DOCUMENTS_PER_CALL * call
    document_1C1 = jnp.arange(_DOCUMENTS_PER_CALL)[None, :, None]
    return Documents(
        jnp.sum(index_in_call_B1T < document_1C1, axis=2, dtype=jnp.int32),
        jnp.sum(index_in_call_B1T == document_1C1, axis=2, dtype=jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, window: int | None) -> tuple[Array, Array]:
    """Return the output and the log-sum-exps, which have no gradient.

    A segment id is a document's index within its row.
    """
    return _forward(inputs, window)[0]


def _forward(inputs: Inputs, window: int | None):
    B, T, N, _ = inputs.q_BTNH.shape
    indices_BT = inputs.segment_ids_BS
    assert indices_BT is not None

    def call_kernel(call, outputs):
        packed = documents_of_call(indices_BT, call)
        o_BTNH, lse_DNT = _make_call(inputs, packed, window).forward()
        mask_BT = packed.mask(T)
        return (
            jnp.where(mask_BT[..., None, None], o_BTNH, outputs[0]),
            jnp.where(mask_BT[:, None], packed.to_rows(lse_DNT), outputs[1]),
        )

    zeros = jnp.zeros_like(inputs.q_BTNH), jnp.zeros((B, N, T), jnp.float32)
    o, lse_BNT = jax.lax.fori_loop(0, _num_calls(indices_BT), call_kernel, zeros)
    o = saveable(o, "attention")
    lse_BNT = saveable(lse_BNT, "attention")
    return (o, lse_BNT), (inputs, o, lse_BNT)


def _backward(window: int | None, residuals, cotangents):
    inputs, o_BTNH, lse_BNT = residuals
    do_BTNH, _ = cotangents
    q, k, v, indices_BT, _ = inputs

    def call_kernel(call, grads):
        packed = documents_of_call(indices_BT, call)
        lse_DNT = packed.to_documents(lse_BNT)
        kernel_call = _make_call(inputs, packed, window)
        new_grads = kernel_call.backward(lse_DNT, o_BTNH, do_BTNH)
        mask = packed.mask(q.shape[1])[..., None, None]
        return [
            jnp.where(mask, new, old) for new, old in zip(new_grads, grads, strict=True)
        ]

    zeros = [jnp.zeros_like(x) for x in (q, k, v)]
    dq, dk, dv = jax.lax.fori_loop(0, _num_calls(indices_BT), call_kernel, zeros)
    return (Inputs(dq, dk, dv),)


_attend.defvjp(_forward, _backward)


def _num_calls(indices_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """Return how many calls of the kernel the row with the most documents needs."""
    return jnp.max(indices_BT) // _DOCUMENTS_PER_CALL + 1


def _make_call(inputs: Inputs, packed: Documents, window: int | None) -> PackedCall:
    """Return a call whose results are arbitrary except in the documents `packed`."""
    _, T, N, H = inputs.q_BTNH.shape
    K = inputs.k_BSKH.shape[2]
    return PackedCall(inputs, packed.operands(T, (N * H, K * H)), window)
