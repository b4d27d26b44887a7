"""NVIDIA's fused attention of packed documents, told where each begins.

No [B, 1, T, T] mask is built, and pairs of positions of two documents are skipped
instead of masked. The kernel takes a fixed number of documents of each row at a time:
a loop goes on until those of all rows have had their turn, so rows may hold any number.
It is two, since XLA does not tell cuDNN how many positions there are in all: the
workspace of its backward pass is a float32 array like the queries for each of them.

Needs Hopper or later. Documents are runs of positions: an id that comes back later in a
row is another document.

Source: jax/_src/cudnn/fused_attention_stablehlo.py (what the operands mean),
NVIDIA/cudnn-frontend, include/cudnn_frontend/node/scaled_dot_product_flash_attention.h
(the workspace). jax's public function multiplies the offsets of grouped keys by the
number of query heads (jax 0.10.2; later ones do not), hence the primitives below it.

Shapes: B batch, T time, N query heads, K key/value heads, H head dim, C documents of a
row at a time, D = B C documents.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Float, Int

from model.attention import cudnn
from model.attention.cudnn import PARAMETERS
from model.remat import named

MULTIPLE = cudnn.MULTIPLE
why_not = cudnn.why_not
_AT_A_TIME = 2  # the least that cuDNN takes offsets for


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
    """Run the kernel on a device's own rows and heads; without documents `cudnn`'s.

    Raises:
        ValueError: if the device's queries have more elements than an int32 offset
            reaches.
    """
    if segment_ids_BT is None:
        more: Any = {"window": window, "soft_cap": soft_cap}
        return cudnn.attend(q_BTNH, k_BTKH, v_BTKH, None, sinks_N, **more)
    assert (sinks_N, soft_cap) == (None, None), "why_not"
    if q_BTNH.size >= 2**31:
        raise ValueError(
            f"cudnn_packed attention reaches 2^31 elements of queries, not the "
            f"{q_BTNH.size:,} of these {len(q_BTNH)} rows; take more microbatches "
            f"(train.accumulation_steps) or model.attention=cudnn"
        )
    return _attend(window, q_BTNH, k_BTKH, v_BTKH, _numbered(segment_ids_BT))


class Documents(NamedTuple):
    """C documents of each row, first those of the first row.

    starts_BC: position in the row; T where a row has no more documents.
    lengths_BC: 0 where a row has no more.
    """

    starts_BC: Int[Array, "B C"]
    lengths_BC: Int[Array, "B C"]

    def operands(self, T: int, elements: tuple[int, int]) -> tuple[Array, ...]:
        """Return lengths and offsets of queries and of keys, as cuDNN takes them.

        D offsets come first, counted in elements over all rows, then their end: an
        array [B, C + 1] for its size, from which jax reads how many documents to
        expect.

        Args:
            T: positions of a row.
            elements: of a position's queries, and of its keys.
        """
        B, C = self.starts_BC.shape
        starts = (self.starts_BC + T * jnp.arange(B, dtype=jnp.int32)[:, None]).ravel()
        starts = jnp.pad(starts, (0, B), constant_values=B * T).reshape(B, C + 1)
        return self.lengths_BC, self.lengths_BC, *(starts * each for each in elements)

    def hold(self, T: int) -> Bool[Array, "B T"]:
        """Tell which positions are of these documents."""
        first_B1, end_B1 = self.starts_BC[:, :1], self._ends_BC[:, -1:]
        position_1T = jnp.arange(T)[None]
        return (position_1T >= first_B1) & (position_1T < end_B1)

    def of_positions(self, x_DNT: Float[Array, "D N T"]) -> Float[Array, "B N T"]:
        """Bring what counts from each document's start to its position in the row."""
        (B, C), (_, N, T) = self.starts_BC.shape, x_DNT.shape
        position_1T = jnp.arange(T)[None]
        which_BT = jnp.sum(position_1T[None] >= self._ends_BC[..., None], axis=1)
        which_BT = jnp.minimum(which_BT, C - 1)
        since_BT = position_1T - jnp.take_along_axis(self.starts_BC, which_BT, axis=1)
        at_BT = which_BT * T + jnp.clip(since_BT, 0, T - 1)
        x_BNCT = x_DNT.reshape(B, C, N, T).swapaxes(1, 2).reshape(B, N, C * T)
        return jnp.take_along_axis(x_BNCT, at_BT[:, None], axis=2)

    def of_documents(self, x_BNT: Float[Array, "B N T"]) -> Float[Array, "D N T"]:
        """Count from each document's start; what lies behind its end is not read."""
        T = x_BNT.shape[2]
        at_BCT = self.starts_BC[..., None] + jnp.arange(T)[None, None]
        at_BCT = jnp.minimum(at_BCT, T - 1)
        x_BCNT = jnp.take_along_axis(x_BNT[:, None], at_BCT[:, :, None], axis=3)
        return x_BCNT.reshape(-1, *x_BNT.shape[1:])

    @property
    def _ends_BC(self) -> Array:
        return self.starts_BC + self.lengths_BC


def _numbered(segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number each row's documents from 0 on, in their order."""
    begins = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def documents(numbers_BT: Int[Array, "B T"], turn: Array | int) -> Documents:
    """Return the documents whose turn it is, counted from 0 on."""
    since_B1T = numbers_BT[:, None] - _AT_A_TIME * turn
    each_1C1 = jnp.arange(_AT_A_TIME)[None, :, None]
    return Documents(
        jnp.sum(since_B1T < each_1C1, axis=2, dtype=jnp.int32),
        jnp.sum(since_B1T == each_1C1, axis=2, dtype=jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window: int | None, q, k, v, numbers_BT) -> Array:
    return _forward(window, q, k, v, numbers_BT)[0]


def _forward(window: int | None, q, k, v, numbers_BT):
    B, T, N, _ = q.shape

    def take_turn(turn, found):
        these = documents(numbers_BT, turn)
        o, stats_DNT = _run_forward(q, k, v, these, window)
        held_BT, lse = these.hold(T), these.of_positions(stats_DNT)
        return (
            jnp.where(held_BT[..., None, None], o, found[0]),
            jnp.where(held_BT[:, None], lse, found[1]),
        )

    nothing = jnp.zeros_like(q), jnp.zeros((B, N, T), jnp.float32)
    o, lse_BNT = jax.lax.fori_loop(0, _turns(numbers_BT), take_turn, nothing)
    o, lse_BNT = named(o, "attention"), named(lse_BNT, "attention")
    return o, (q, k, v, numbers_BT, o, lse_BNT)


def _backward(window: int | None, residuals, do):
    q, k, v, numbers_BT, o, lse_BNT = residuals
    T = q.shape[1]

    def take_turn(turn, grads):
        these = documents(numbers_BT, turn)
        more = _run_backward(q, k, v, o, lse_BNT, do, these, window)
        held = these.hold(T)[..., None, None]
        return [jnp.where(held, *pair) for pair in zip(more, grads, strict=True)]

    nothing = [jnp.zeros_like(x) for x in (q, k, v)]
    grads = jax.lax.fori_loop(0, _turns(numbers_BT), take_turn, nothing)
    return *grads, None


_attend.defvjp(_forward, _backward)


def _turns(numbers_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """Return how many turns it takes until no row has documents left."""
    return jnp.max(numbers_BT) // _AT_A_TIME + 1


def _run_forward(
    q: Array, k: Array, v: Array, these: Documents, window: int | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "D N T"]]:
    """Return results, and each document's log-sum-exps from its start on.

    What is of no document here holds anything.
    """
    operands, how = _arguments(q, k, v, these, window)
    bind = fused._dot_product_attention_fwd_p.bind
    o, stats_DNT = bind(*operands, **how, is_training=True)
    return o, stats_DNT


def _run_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse_BNT: Array,
    do: Array,
    these: Documents,
    window: int | None,
) -> list[Array]:
    """Return the gradients of q, k and v; of no document here they hold anything."""
    operands, how = _arguments(q, k, v, these, window)
    rest = these.of_documents(lse_BNT), o, do
    return fused._dot_product_attention_bwd_p.bind(*operands, *rest, **how)


def _arguments(
    q: Array, k: Array, v: Array, these: Documents, window: int | None
) -> tuple[list[Array], dict[str, Any]]:
    """Return operands and parameters that both primitives have."""
    T, (K, H) = q.shape[1], k.shape[2:]
    told = these.operands(T, (q.shape[2] * H, K * H))
    layout, none = fused.AttentionLayout.BTNH, jnp.zeros(0, q.dtype)
    fused.check_layout(q, k, v, None, None, None, None, None, None, None, layout)
    how = PARAMETERS | {
        "scale": H**-0.5,
        "variadic_args": (False, False),  # no bias, no gradient of it
        "mask_type": fused.MaskType.PADDING_CAUSAL,
        "layout": layout.value,
        "sliding_window_length": window,
    }
    return [q, k, v, none, *told, none, none], how
