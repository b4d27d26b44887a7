"""Rows that devices share: what a piece of a row gets from the pieces before it.

A device has one piece of each of its rows, or two in ring order (attention/ring.py).
Pieces are treated as rows of their own, whose state and whose earlier inputs come from
other devices.

Shapes: B batch, T local time, U time of a piece, P pieces of a whole row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from model.attention.cache import DeltaState
from model.delta.rule import AffineMap
from model.execution import CallContext, Execution


class RowPieces(NamedTuple):
    """The pieces of rows that devices share over the manual mesh axes `axes`.

    Without axes, a piece is a whole row.
    """

    axes: tuple[str, ...] = ()
    in_ring_order: bool = False

    @property
    def _num_local(self) -> int:
        return 1 + self.in_ring_order

    def split(self, x: Shaped[Array, "B T *dims"]) -> Shaped[Array, "rows U *dims"]:
        """Return a device's pieces as separate rows."""
        B, T, *dims = x.shape
        pieces = x.reshape(B, self._num_local, -1, *dims)
        return jnp.moveaxis(pieces, 1, 0).reshape(-1, T // self._num_local, *dims)

    def join(self, x: Shaped[Array, "rows U *dims"]) -> Shaped[Array, "B T *dims"]:
        """Undo `split`."""
        pieces = x.reshape(self._num_local, -1, *x.shape[1:])
        joined = jnp.moveaxis(pieces, 0, 1)
        return joined.reshape(joined.shape[0], -1, *x.shape[2:])

    def previous(self, x: Shaped[Array, "rows *dims"]) -> Shaped[Array, "rows *dims"]:
        """Return what the piece before each piece has; zeros for the first of a row."""
        if not self.axes:
            return jnp.zeros_like(x)
        gathered = self._gather(x)
        return self._take_local(
            jnp.concatenate([jnp.zeros_like(gathered[:1]), gathered[:-1]])
        )

    def state_before(self, local_map: AffineMap) -> jax.Array:
        """Return the state before each piece, from the maps of all earlier pieces."""
        maps = AffineMap(*map(self._gather, local_map))
        _, states = jax.lax.scan(
            lambda state, piece_map: (piece_map(state), state),
            jnp.zeros_like(maps.offset[0]),
            maps,
        )
        return self._take_local(states)

    def _gather(self, x: jax.Array) -> jax.Array:
        """Return [P, B, ...] of all devices, in the order of the row."""
        local = x.reshape(self._num_local, -1, *x.shape[1:])
        by_device = jax.lax.all_gather(local, self.axes)
        pieces = jnp.moveaxis(by_device, 1, 0)
        if self.in_ring_order:  # Device i of c has the pieces i and 2c-1-i.
            return jnp.concatenate([pieces[0], pieces[1][::-1]])
        return pieces[0]

    def _take_local(self, x: jax.Array) -> jax.Array:
        """Return [rows, ...] of a device's pieces, from [P, B, ...]."""
        i = jax.lax.axis_index(self.axes)
        numbers = [i, len(x) - 1 - i][: self._num_local]
        return x[jnp.stack(numbers)].reshape(-1, *x.shape[2:])


def row_pieces(execution: Execution) -> RowPieces:
    """Return how devices share rows."""
    in_ring = execution.context_attention.has_ring_order(execution.attention)
    axes = execution.placement.sequence_axes
    return RowPieces(axes, in_ring_order=bool(axes) and in_ring)


def document_starts(
    x_BTD: Float[Array, "B T D"],
    call: CallContext,
    cache: DeltaState | None,
    pieces: RowPieces,
) -> Bool[Array, "rows U"]:
    """Return where the documents of each piece start; not for a row's first one.

    Before the first position of a row, state and inputs are zero in any case.
    """
    B, T, _ = x_BTD.shape
    if cache is not None and cache.first_B is not None:
        return cache.length + jnp.arange(T)[None] == cache.first_B[:, None]
    if cache is not None or call.segment_ids_BT is None:
        return pieces.split(jnp.zeros((B, T), bool))
    ids_BT = pieces.split(call.segment_ids_BT)
    previous_B1 = pieces.previous(ids_BT[:, -1])[:, None]
    return ids_BT != jnp.concatenate([previous_B1, ids_BT[:, :-1]], axis=1)
