"""Attention over packed documents by NVIDIA's kernel, told where each begins.

No [B, 1, T, T] mask is built, and pairs of positions of two documents are skipped
instead of masked. One call of the kernel takes a fixed number of documents of each row,
and a loop calls it until the documents of all rows are done, so that rows may hold any
number. The fixed number is two: XLA does not tell cuDNN how many positions there are
in all, so that the workspace of the backward pass holds one float32 array of the
queries' size for each document of a call.

The kernel needs Hopper or later. A document is a run of positions: if an id returns
later in the row, it is another document.

Source: NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h (the workspace).

Shapes: B batch, T time, N query heads, K key/value heads, H head dim, C documents of a
row in one call, D = B C documents.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.attention import cudnn
from model.attention.inputs import Inputs
from model.compat import PackedCall
from model.remat import saveable

MULTIPLE = cudnn.MULTIPLE
_DOCUMENTS_PER_CALL = 2  # The least number for which cuDNN takes offsets.


def attend(
    inputs: Inputs, *, window: int | None = None, soft_cap: float | None = None
) -> Float[Array, "B T N H"]:
    """Run the kernel on local rows and heads; without documents, run `cudnn`.

    Raises:
        ValueError: if the local queries have more elements than an int32 offset can
            count.
    """
    q_BTNH, ids_BT = inputs.q_BTNH, inputs.segment_ids_BS
    if ids_BT is None:
        return cudnn.attend(inputs, window=window, soft_cap=soft_cap)
    assert (inputs.sinks_N, soft_cap) == (None, None), "choose_kernel refuses these"
    if q_BTNH.size >= 2**31:
        raise ValueError(
            f"cudnn_packed attention reaches 2^31 elements of queries, not the "
            f"{q_BTNH.size:,} of these {len(q_BTNH)} rows; take more microbatches "
            f"(train.accumulation_steps) or model.attention=cudnn"
        )
    begins = ids_BT[:, 1:] != ids_BT[:, :-1]
    numbers_BT = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return _attend(
        inputs._replace(segment_ids_BS=jnp.pad(numbers_BT, ((0, 0), (1, 0)))), window
    )


class Documents(NamedTuple):
    """C documents of each row.

    starts_BC: the first position of each in its row, or T if the row has fewer.
    lengths_BC: the number of positions of each, or 0 if the row has fewer.
    """

    starts_BC: Int[Array, "B C"]
    lengths_BC: Int[Array, "B C"]

    def operands(self, T: int, elements: tuple[int, int]) -> tuple[Array, ...]:
        """Return lengths and offsets of queries and of keys in the form for cuDNN.

        An array of offsets holds D starts, counted in elements over all rows, and then
        ends. Its shape is [B, C + 1], from which jax reads the number of documents. A
        row has T positions, each with these numbers of elements of queries and keys.
        """
        B, C = self.starts_BC.shape
        starts = (self.starts_BC + T * jnp.arange(B, dtype=jnp.int32)[:, None]).ravel()
        starts = jnp.pad(starts, (0, B), constant_values=B * T).reshape(B, C + 1)
        return self.lengths_BC, self.lengths_BC, *(starts * size for size in elements)

    def contain(self, T: int) -> Bool[Array, "B T"]:
        """Return true for each position of these documents."""
        first_B1, end_B1 = self.starts_BC[:, :1], self._ends_BC[:, -1:]
        position_1T = jnp.arange(T)[None]
        return (position_1T >= first_B1) & (position_1T < end_B1)

    def to_rows(self, x_DNT: Float[Array, "D N T"]) -> Float[Array, "B N T"]:
        """Move values that begin at each document's start to their row's positions."""
        (B, C), (_, N, T) = self.starts_BC.shape, x_DNT.shape
        position_1T = jnp.arange(T)[None]
        which_BT = jnp.sum(position_1T[None] >= self._ends_BC[..., None], axis=1)
        which_BT = jnp.minimum(which_BT, C - 1)
        since_BT = position_1T - jnp.take_along_axis(self.starts_BC, which_BT, axis=1)
        at_BT = which_BT * T + jnp.clip(since_BT, 0, T - 1)
        x_BNCT = x_DNT.reshape(B, C, N, T).swapaxes(1, 2).reshape(B, N, C * T)
        return jnp.take_along_axis(x_BNCT, at_BT[:, None], axis=2)

    def to_documents(self, x_BNT: Float[Array, "B N T"]) -> Float[Array, "D N T"]:
        """Move each document's values to begin at 0; the others are undefined."""
        T = x_BNT.shape[2]
        at_BCT = self.starts_BC[..., None] + jnp.arange(T)[None, None]
        at_BCT = jnp.minimum(at_BCT, T - 1)
        x_BCNT = jnp.take_along_axis(x_BNT[:, None], at_BCT[:, :, None], axis=3)
        return x_BCNT.reshape(-1, *x_BNT.shape[1:])

    @property
    def _ends_BC(self) -> Array:
        return self.starts_BC + self.lengths_BC


def documents(numbers_BT: Int[Array, "B T"], call: Array | int) -> Documents:
    """Return the documents of one call of the kernel.

    Calls are numbered from 0, and documents from 0 within their row.
    """
    in_call_B1T = numbers_BT[:, None] - _DOCUMENTS_PER_CALL * call
    document_1C1 = jnp.arange(_DOCUMENTS_PER_CALL)[None, :, None]
    return Documents(
        jnp.sum(in_call_B1T < document_1C1, axis=2, dtype=jnp.int32),
        jnp.sum(in_call_B1T == document_1C1, axis=2, dtype=jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(numbered: Inputs, window: int | None) -> Array:
    """Attend within documents that are numbered from 0 within their row."""
    return _forward(numbered, window)[0]


def _forward(numbered: Inputs, window: int | None):
    (B, T, N, _), numbers_BT = numbered.q_BTNH.shape, numbered.segment_ids_BS
    assert numbers_BT is not None

    def call_kernel(call, outputs):
        packed = documents(numbers_BT, call)
        o_BTNH, lse_DNT = _call(numbered, packed, window).forward()
        inside_BT = packed.contain(T)
        return (
            jnp.where(inside_BT[..., None, None], o_BTNH, outputs[0]),
            jnp.where(inside_BT[:, None], packed.to_rows(lse_DNT), outputs[1]),
        )

    zeros = jnp.zeros_like(numbered.q_BTNH), jnp.zeros((B, N, T), jnp.float32)
    o, lse_BNT = jax.lax.fori_loop(0, _num_calls(numbers_BT), call_kernel, zeros)
    o, lse_BNT = saveable(o, "attention"), saveable(lse_BNT, "attention")
    return o, (numbered, o, lse_BNT)


def _backward(window: int | None, residuals, do_BTNH):
    numbered, o_BTNH, lse_BNT = residuals
    q, k, v, numbers_BT, _ = numbered

    def call_kernel(call, grads):
        packed = documents(numbers_BT, call)
        lse_DNT = packed.to_documents(lse_BNT)
        new_grads = _call(numbered, packed, window).backward(lse_DNT, o_BTNH, do_BTNH)
        inside = packed.contain(q.shape[1])[..., None, None]
        return [
            jnp.where(inside, new, old)
            for new, old in zip(new_grads, grads, strict=True)
        ]

    zeros = [jnp.zeros_like(x) for x in (q, k, v)]
    dq, dk, dv = jax.lax.fori_loop(0, _num_calls(numbers_BT), call_kernel, zeros)
    return (Inputs(dq, dk, dv),)


_attend.defvjp(_forward, _backward)


def _num_calls(numbers_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """Return how many calls of the kernel the row with the most documents needs."""
    return jnp.max(numbers_BT) // _DOCUMENTS_PER_CALL + 1


def _call(inputs: Inputs, packed: Documents, window: int | None) -> PackedCall:
    """Return a call, whose results at positions of other documents are arbitrary."""
    (_, T, N, H), K = inputs.q_BTNH.shape, inputs.k_BSKH.shape[2]
    return PackedCall(inputs, packed.operands(T, (N * H, K * H)), window)
