"""Move tokens to experts' rows and back, on one device and between devices.

Each token has k rows, one for each of its experts, or for each of its copies to
devices. All rows are sorted by expert, or by device. `to_rows` copies tokens to rows,
`from_rows` adds up each token's rows, and `travel` and `swap_pieces` send rows to
devices or back. The gradient of each operation is one of these operations, so that no
gradient is a scatter.

Shapes: n tokens, k rows of each, R rows, D embed, S devices, each of which sends a
piece of rows to each device.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.custom_vjp
def to_rows(x_nD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Copy each token to its rows. The gradient avoids a scatter, which is slow.

    Args:
        x_nD: tokens.
        token_R: the token of each row.
        row_nk: the rows of each token. Indices from R on stand for no row.
    """
    return x_nD[token_R]


@jax.custom_vjp
def from_rows(y_RD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Add up each token's rows. Transposes `to_rows` if y is 0 in unused rows."""
    y_nkD = y_RD.at[row_nk].get(mode="fill", fill_value=0)
    return jnp.sum(y_nkD, axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _make_forward(function: Callable) -> Callable:
    return lambda x, token_R, row_nk: (function(x, token_R, row_nk), (token_R, row_nk))


def _to_rows_backward(indices: tuple[jax.Array, jax.Array], dx_RD: jax.Array):
    token_R, row_nk = indices
    return from_rows(dx_RD, token_R, row_nk), None, None


def _from_rows_backward(indices: tuple[jax.Array, jax.Array], dy_nD: jax.Array):
    token_R, row_nk = indices
    return to_rows(dy_nD, token_R, row_nk), None, None


to_rows.defvjp(_make_forward(to_rows), _to_rows_backward)
from_rows.defvjp(_make_forward(from_rows), _from_rows_backward)


def cut_into_pieces(
    choice_R: Int[Array, "R"],
    row_nk: Int[Array, "n k"],
    device_nk: Int[Array, "n k"],
    sizes_S: Int[Array, "S"],
    piece: int,
) -> tuple[Int[Array, "P"], Int[Array, "n k"], Bool[Array, "P 1"]]:
    """Move rows that are sorted by device to pieces of equal size, one a device.

    Args:
        choice_R: the choice of each row.
        row_nk: the row of each choice.
        device_nk: the device of each choice, or S for a choice without a row.
        sizes_S: the number of rows for each device.
        piece: the number of rows of a piece. Further rows are left out.

    Returns:
        The choice of each of the P = S `piece` rows, the row of each choice or P, and
        whether a row has a choice.
    """
    S = len(sizes_S)
    starts_S = jnp.cumsum(sizes_S) - sizes_S
    places = jnp.arange(piece)[None]
    is_used_SP = places < sizes_S[:, None]
    choice_SP = choice_R.at[starts_S[:, None] + places].get(mode="clip")
    moved_S = piece * jnp.arange(S) - starts_S
    moved_nk = row_nk + moved_S.at[device_nk].get(mode="clip")
    moved_nk = jnp.where(device_nk < S, moved_nk, S * piece)
    return choice_SP.reshape(-1), moved_nk, is_used_SP.reshape(-1, 1)


def swap_pieces(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Send the i-th of S equal pieces of rows to device i of these mesh axes.

    The pieces that arrive are sorted by sender.
    """
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


class Pieces(NamedTuple):
    """The pieces of rows that a device sends, and where its receivers put them.

    starts, sizes: the first row and the size of each piece, in the order of receivers.
    receiver_starts: the first row of each piece on its receiver.
    received_sizes: the sizes of the pieces that the device receives, by sender.
    """

    starts: Int[Array, "S"]
    sizes: Int[Array, "S"]
    receiver_starts: Int[Array, "S"]
    received_sizes: Int[Array, "S"]


class Route(NamedTuple):
    """The pieces to send, and the same pieces in the other direction."""

    out: Pieces
    back: Pieces

    def reverse(self) -> "Route":
        """Return the route in the other direction."""
        return Route(self.back, self.out)

    @classmethod
    def to_devices(cls, rows_SS: Int[Array, "S S"], axes: tuple[str, ...]) -> "Route":
        """Return the route of rows that each device has sorted by receiver.

        The rows that a device receives are sorted by sender.

        Args:
            rows_SS: the number of rows of each sender for each receiver, replicated.
            axes: mesh axes along which devices exchange rows, in order.
        """
        device = jax.lax.axis_index(axes)
        starts_SS = jnp.cumsum(rows_SS, axis=1) - rows_SS
        receiver_starts_SS = jnp.cumsum(rows_SS, axis=0) - rows_SS
        sent = rows_SS[device]
        received = rows_SS[:, device]
        starts = starts_SS[device]
        return_starts = starts_SS[:, device]
        remote_starts = receiver_starts_SS[device]
        local_starts = receiver_starts_SS[:, device]
        return cls(
            out=Pieces(starts, sent, remote_starts, received),
            back=Pieces(local_starts, received, return_starts, sent),
        )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def travel(
    x: jax.Array,
    route: Route,
    capacities: tuple[int, int],
    axes: tuple[str, ...],
    emulated: bool,
) -> jax.Array:
    """Return the rows that a device receives, followed by zeros up to its capacity.

    The gradient travels along the reverse route.

    Args:
        x: rows, with any further dims.
        route: the pieces to send.
        capacities: the capacity in rows of the sender and of the receiver.
        axes: mesh axes along which devices exchange rows.
        emulated: gather all rows and select, because XLA:CPU has no ragged all-to-all.
    """
    out = route.out
    capacity = capacities[1]
    if not emulated:
        return jax.lax.ragged_all_to_all(
            x,
            jnp.zeros((capacity, *x.shape[1:]), x.dtype),
            input_offsets=out.starts,
            send_sizes=out.sizes,
            output_offsets=out.receiver_starts,
            recv_sizes=out.received_sizes,
            axis_name=axes,
        )
    sender_starts = swap_pieces(out.starts, axes)
    starts = swap_pieces(out.receiver_starts, axes)
    rows = jnp.arange(capacity)[:, None]
    in_piece = (rows >= starts) & (rows < starts + out.received_sizes)
    sender = jnp.argmax(in_piece, axis=1)
    sender_row = sender_starts[sender] + rows[:, 0] - starts[sender]
    y = jax.lax.all_gather(x, axes)[sender, sender_row]
    is_sent = jnp.any(in_piece, axis=1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(is_sent, y, 0)


def _travel_forward(x, route: Route, capacities, axes, emulated):
    return travel(x, route, capacities, axes, emulated), route


def _travel_backward(capacities, axes, emulated, route: Route, dy):
    return travel(dy, route.reverse(), capacities[::-1], axes, emulated), None


travel.defvjp(_travel_forward, _travel_backward)
