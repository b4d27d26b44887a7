"""Tokens to rows of experts and back, on one device and between devices.

Each token has k rows, sorted by expert. `to_rows` copies tokens to rows, `from_rows`
adds rows up; `travel` brings rows to the devices that have their experts, or back from
there. Each is the transpose of another one, so that no gradient is a scatter, and none
exchanges anything but rows.

Shapes: n tokens, k rows of each, R rows, D embed, E experts of all devices, P pieces of
rows (one for each expert on each other device), S devices.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.custom_vjp
def to_rows(x_nD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Copy each token to its rows. The gradient is no scatter, which is slow.

    Args:
        x_nD: tokens.
        token_R: of each row.
        row_nk: the rows of each token; those from R on are not there.
    """
    return x_nD[token_R]


@jax.custom_vjp
def from_rows(y_RD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Add up each token's rows: the transpose of `to_rows` if no one's rows are 0."""
    y_nkD = y_RD.at[row_nk].get(mode="fill", fill_value=0)
    return jnp.sum(y_nkD, axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _keep(function):
    return lambda x, token, row: (function(x, token, row), (token, row))


to_rows.defvjp(_keep(to_rows), lambda places, dx: (from_rows(dx, *places), None, None))
from_rows.defvjp(
    _keep(from_rows), lambda places, dy: (to_rows(dy, *places), None, None)
)


class Pieces(NamedTuple):
    """The pieces of rows that a device sends, and their places on the receivers.

    starts, sizes: of the pieces that it sends, sorted by receiver.
    to: the start of each piece on its receiver.
    received: the sizes of the pieces that it gets, sorted by sender.
    """

    starts: Int[Array, "P"]
    sizes: Int[Array, "P"]
    to: Int[Array, "P"]
    received: Int[Array, "P"]


def pieces_to_exchange(
    rows_SE: Int[Array, "S E"], axes: tuple[str, ...]
) -> tuple[Pieces, Pieces]:
    """Return how rows go to the devices of their experts, and how they come back.

    At home they lie sorted by expert, there by expert and, of one, by home.

    Args:
        rows_SE: of each device for each expert, the same on all devices.
        axes: mesh axes along which experts lie apart, in order.
    """
    S, E = rows_SE.shape
    own = jax.lax.axis_index(axes)
    here_SE = jnp.cumsum(rows_SE, axis=1) - rows_SE

    def by_receiver(x_SE: jax.Array) -> jax.Array:  # [S, S, experts of a device]
        return x_SE.reshape(S, S, E // S)

    arriving = by_receiver(rows_SE).transpose(1, 2, 0)
    flat = arriving.reshape(S, E)
    there = (jnp.cumsum(flat, axis=1) - flat).reshape(arriving.shape)
    there = there.transpose(2, 0, 1)
    to_own = by_receiver(rows_SE)[:, own].reshape(-1)
    out = Pieces(here_SE[own], rows_SE[own], there[own].reshape(-1), to_own)
    home = by_receiver(here_SE)[:, own].reshape(-1)
    return out, Pieces(there[:, own].reshape(-1), to_own, home, rows_SE[own])


def travel(
    x: jax.Array,
    out: Pieces,
    back: Pieces,
    lengths: tuple[int, int],
    axes: tuple[str, ...],
    emulated: bool,
) -> jax.Array:
    """Send rows to other devices. Rows that no device sends are zeros.

    The gradient is sent back.

    Args:
        x: rows, with any further dims.
        out: the pieces to send.
        back: the same pieces in the other direction.
        lengths: the capacity in rows of the sender and of the receiver.
        axes: mesh axes along which devices exchange rows.
        emulated: gather all rows instead, because XLA:CPU has no ragged all-to-all.
    """
    return _travel(x, out, back, lengths, axes, emulated)  # pyright: ignore[reportReturnType]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _travel(x, out: Pieces, back: Pieces, lengths, axes, emulated):
    length = lengths[1]
    if not emulated:
        room = jnp.zeros((length, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, room, *out, axis_name=axes)
    swap = partial(
        jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
    )
    starts, to = swap(out.starts), swap(out.to)
    places = jnp.arange(length)[:, None]
    inside = (places >= to) & (places < to + out.received)
    piece = jnp.argmax(inside, axis=1)
    sender = piece // (to.size // jax.lax.psum(1, axes))
    row = starts[piece] + places[:, 0] - to[piece]
    y = jax.lax.all_gather(x, axes)[sender, row]
    found = jnp.any(inside, axis=1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(found, y, 0)


def _sent(x, out, back, lengths, axes, emulated):
    return _travel(x, out, back, lengths, axes, emulated), (out, back)


def _returned(lengths, axes, emulated, places, dy):
    out, back = places
    dx = _travel(dy, back, out, lengths[::-1], axes, emulated)
    return dx, None, None


_travel.defvjp(_sent, _returned)
