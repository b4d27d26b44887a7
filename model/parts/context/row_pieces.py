"""Rows that devices share: what a piece of a row gets from the pieces before it.

A device has one piece of each of its rows, or two in ring order (`ring.py`).
A piece is treated as a row of its own, whose state and whose earlier inputs come from
other devices.

Shapes: B batch, T local time, U time of a piece, S = U + earlier positions, P pieces of
a whole row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from model.execution import Execution


class RowPieces(NamedTuple):
    """The pieces of rows that devices share over the manual mesh axes `axes`.

    Without axes, a piece is a whole row. A device has `num_local` pieces of a row.
    """

    axes: tuple[str, ...] = ()
    num_local: int = 1

    def split(self, x: Shaped[Array, "B T *dims"]) -> Shaped[Array, "rows U *dims"]:
        """Return a device's pieces as separate rows."""
        return jnp.concatenate(jnp.split(x, self.num_local, axis=1))

    def join(self, x: Shaped[Array, "rows U *dims"]) -> Shaped[Array, "B T *dims"]:
        """Undo `split`."""
        return jnp.concatenate(jnp.split(x, self.num_local), axis=1)

    def prepend(
        self, x: Shaped[Array, "rows U *dims"], count: int
    ) -> Shaped[Array, "rows S *dims"]:
        """Return each piece after the last `count` positions of the piece before it.

        These are zeros before the first piece of a row.
        """
        last = jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype)
        if self.axes:
            pieces = self.gather(x[:, -count:])
            no_piece = jnp.zeros_like(pieces[:1])
            last = self.take_local(jnp.concatenate([no_piece, pieces[:-1]]))
        return jnp.concatenate([last, x], axis=1)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return [P, B, ...] of all devices, in the order of the row."""
        local = x.reshape(self.num_local, 1, -1, *x.shape[1:])
        first, *second = jax.lax.all_gather(local, self.axes, axis=1, tiled=True)
        # In ring order, device i of c has the pieces i and 2c-1-i.
        return jnp.concatenate([first, *(pieces[::-1] for pieces in second)])

    def take_local(self, x: jax.Array) -> jax.Array:
        """Return [rows, ...] of a device's pieces, from [P, B, ...]."""
        i = jax.lax.axis_index(self.axes)
        numbers = jnp.stack([i, len(x) - 1 - i][: self.num_local])
        return x[numbers].reshape(-1, *x.shape[2:])


def row_pieces(execution: Execution) -> RowPieces:
    """Return how devices share rows."""
    axes = execution.placement.sequence_axes
    in_ring = execution.attention.in_ring_order
    return RowPieces(axes, num_local=2 if axes and in_ring else 1)
