"""Attention over packed documents by NVIDIA's kernel, told where each begins.

No [B, 1, T, T] mask is built, and pairs of positions of two documents are skipped
instead of masked. One call of the kernel takes a fixed number of documents of each row,
and a loop calls it until the documents of all rows are done, so that rows may hold any
number. The fixed number is two: XLA does not tell cuDNN how many positions there are
in all, so that the workspace of the backward pass holds one float32 array of the
queries' size for each document of a call.

The kernel needs Hopper or later. A document is a run of positions: if an id returns
later in the row, it is another document.

Source: jax/_src/cudnn/fused_attention_stablehlo.py (the meaning of the operands) and
NVIDIA/cudnn-frontend, include/cudnn_frontend/node/scaled_dot_product_flash_attention.h
(the workspace). The public function of jax 0.10.2 multiplies the offsets of grouped
keys by the number of query heads, and later versions do not. Therefore the primitives
below it are called.

Shapes: B batch, T time, N query heads, K key/value heads, H head dim, C documents of a
row in one call, D = B C documents.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Float, Int

from model.attention import cudnn
from model.attention.cudnn import PARAMETERS
from model.remat import saveable

MULTIPLE = cudnn.MULTIPLE
why_not = cudnn.why_not
_DOCUMENTS_PER_CALL = 2  # The least number for which cuDNN takes offsets.


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Run the kernel on local rows and heads; without documents, run `cudnn`.

    Raises:
        ValueError: if the local queries have more elements than an int32 offset can
            count.
    """
    if segment_ids_BT is None:
        return cudnn.attend(
            q_BTNH, k_BTKH, v_BTKH, None, sinks_N, window=window, soft_cap=soft_cap
        )
    assert (sinks_N, soft_cap) == (None, None), "why_not refuses these"
    if q_BTNH.size >= 2**31:
        raise ValueError(
            f"cudnn_packed attention reaches 2^31 elements of queries, not the "
            f"{q_BTNH.size:,} of these {len(q_BTNH)} rows; take more microbatches "
            f"(train.accumulation_steps) or model.attention=cudnn"
        )
    return _attend(window, q_BTNH, k_BTKH, v_BTKH, _document_numbers(segment_ids_BT))


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
        ends. Its shape is [B, C + 1], from which jax reads the number of documents.

        Args:
            T: positions of a row.
            elements: the number of elements of a position's queries, and of its keys.
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


def _document_numbers(segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return each position's document, numbered from 0 within its row."""
    begins = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def documents(numbers_BT: Int[Array, "B T"], call: Array | int) -> Documents:
    """Return the documents of one call of the kernel; calls count from 0."""
    in_call_B1T = numbers_BT[:, None] - _DOCUMENTS_PER_CALL * call
    document_1C1 = jnp.arange(_DOCUMENTS_PER_CALL)[None, :, None]
    return Documents(
        jnp.sum(in_call_B1T < document_1C1, axis=2, dtype=jnp.int32),
        jnp.sum(in_call_B1T == document_1C1, axis=2, dtype=jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window: int | None, q, k, v, numbers_BT) -> Array:
    return _forward(window, q, k, v, numbers_BT)[0]


def _forward(window: int | None, q, k, v, numbers_BT):
    B, T, N, _ = q.shape

    def call_kernel(call, outputs):
        packed = documents(numbers_BT, call)
        o, stats_DNT = _run_forward(q, k, v, packed, window)
        inside_BT, lse = packed.contain(T), packed.to_rows(stats_DNT)
        return (
            jnp.where(inside_BT[..., None, None], o, outputs[0]),
            jnp.where(inside_BT[:, None], lse, outputs[1]),
        )

    zeros = jnp.zeros_like(q), jnp.zeros((B, N, T), jnp.float32)
    o, lse_BNT = jax.lax.fori_loop(0, _num_calls(numbers_BT), call_kernel, zeros)
    o, lse_BNT = saveable(o, "attention"), saveable(lse_BNT, "attention")
    return o, (q, k, v, numbers_BT, o, lse_BNT)


def _backward(window: int | None, residuals, do):
    q, k, v, numbers_BT, o, lse_BNT = residuals
    T = q.shape[1]

    def call_kernel(call, grads):
        packed = documents(numbers_BT, call)
        new_grads = _run_backward(q, k, v, o, lse_BNT, do, packed, window)
        inside = packed.contain(T)[..., None, None]
        return [
            jnp.where(inside, new, old)
            for new, old in zip(new_grads, grads, strict=True)
        ]

    zeros = [jnp.zeros_like(x) for x in (q, k, v)]
    dq, dk, dv = jax.lax.fori_loop(0, _num_calls(numbers_BT), call_kernel, zeros)
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _num_calls(numbers_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """Return how many calls of the kernel the row with the most documents needs."""
    return jnp.max(numbers_BT) // _DOCUMENTS_PER_CALL + 1


def _run_forward(
    q: Array, k: Array, v: Array, packed: Documents, window: int | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "D N T"]]:
    """Return outputs, and the log-sum-exps of each document from its start.

    Values at positions outside these documents are arbitrary.
    """
    operands, parameters = _arguments(q, k, v, packed, window)
    bind = fused._dot_product_attention_fwd_p.bind
    o, stats_DNT = bind(*operands, **parameters, is_training=True)
    return o, stats_DNT


def _run_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse_BNT: Array,
    do: Array,
    packed: Documents,
    window: int | None,
) -> list[Array]:
    """Return the gradients of q, k and v, which are arbitrary outside the documents."""
    operands, parameters = _arguments(q, k, v, packed, window)
    return fused._dot_product_attention_bwd_p.bind(
        *operands, packed.to_documents(lse_BNT), o, do, **parameters
    )


def _arguments(
    q: Array, k: Array, v: Array, packed: Documents, window: int | None
) -> tuple[list[Array], dict[str, Any]]:
    """Return the operands and parameters that both primitives share."""
    T, (K, H) = q.shape[1], k.shape[2:]
    lengths_and_offsets = packed.operands(T, (q.shape[2] * H, K * H))
    layout, none = fused.AttentionLayout.BTNH, jnp.zeros(0, q.dtype)
    fused.check_layout(q, k, v, None, None, None, None, None, None, None, layout)
    parameters = PARAMETERS | {
        "scale": H**-0.5,
        "variadic_args": (False, False),  # No bias and no gradient of one.
        "mask_type": fused.MaskType.PADDING_CAUSAL,
        "layout": layout.value,
        "sliding_window_length": window,
    }
    return [q, k, v, none, *lengths_and_offsets, none, none], parameters
