"""Tokens to rows of experts and back, on one device and between devices.

Each token has k rows, sorted by expert. `to_rows` copies tokens to rows, `from_rows`
adds rows up; `travel` brings rows to the devices that have their experts, or back. Each
is the transpose of another one, so that no gradient is a scatter.

Shapes: n tokens, k rows of each, R rows, D embed, E experts of all devices, P pieces of
rows (one for each expert on each other device), S devices.
"""

from collections.abc import Callable
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
        token_R: the token of each row.
        row_nk: the rows of each token; those from R on do not exist.
    """
    return x_nD[token_R]


@jax.custom_vjp
def from_rows(y_RD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Add up each token's rows: the transpose of `to_rows` if unused rows are 0."""
    y_nkD = y_RD.at[row_nk].get(mode="fill", fill_value=0)
    return jnp.sum(y_nkD, axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _with_places(function: Callable) -> Callable:
    return lambda x, token_R, row_nk: (function(x, token_R, row_nk), (token_R, row_nk))


def _to_rows_backward(places: tuple[jax.Array, jax.Array], dx_RD: jax.Array):
    token_R, row_nk = places
    return from_rows(dx_RD, token_R, row_nk), None, None


def _from_rows_backward(places: tuple[jax.Array, jax.Array], dy_nD: jax.Array):
    token_R, row_nk = places
    return to_rows(dy_nD, token_R, row_nk), None, None


to_rows.defvjp(_with_places(to_rows), _to_rows_backward)
from_rows.defvjp(_with_places(from_rows), _from_rows_backward)


class Pieces(NamedTuple):
    """The pieces of rows that a device sends, and their places on the receivers.

    starts, sizes: those of the pieces that it sends, sorted by receiver.
    to: the start of each piece on its receiver.
    received: the sizes of the pieces that it gets, sorted by sender.
    """

    starts: Int[Array, "P"]
    sizes: Int[Array, "P"]
    to: Int[Array, "P"]
    received: Int[Array, "P"]


class Route(NamedTuple):
    """The pieces to send, and the same pieces in the other direction."""

    out: Pieces
    back: Pieces

    def reverse(self) -> "Route":
        """Return the route in the other direction."""
        return Route(self.back, self.out)

    @classmethod
    def to_experts(cls, rows_SE: Int[Array, "S E"], axes: tuple[str, ...]) -> "Route":
        """Return how rows go to the devices of their experts, and how they come back.

        A device sends rows sorted by expert. It receives rows sorted by expert and,
        for one expert, by sender.

        Args:
            rows_SE: the rows of each device for each expert, the same on all devices.
            axes: mesh axes that shard the experts, in order.
        """
        S, E = rows_SE.shape
        local = jax.lax.axis_index(axes)
        sent_SE = jnp.cumsum(rows_SE, axis=1) - rows_SE

        def by_receiver(x_SE: jax.Array) -> jax.Array:  # [S, S, experts of a device]
            return x_SE.reshape(S, S, E // S)

        arriving = by_receiver(rows_SE).transpose(1, 2, 0)
        flat = arriving.reshape(S, E)
        starts = (jnp.cumsum(flat, axis=1) - flat).reshape(arriving.shape)
        starts = starts.transpose(2, 0, 1)
        received = by_receiver(rows_SE)[:, local].reshape(-1)
        home = by_receiver(sent_SE)[:, local].reshape(-1)
        sent = rows_SE[local]
        return cls(
            Pieces(sent_SE[local], sent, starts[local].reshape(-1), received),
            Pieces(starts[:, local].reshape(-1), received, home, sent),
        )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def travel(
    x: jax.Array,
    route: Route,
    lengths: tuple[int, int],
    axes: tuple[str, ...],
    emulated: bool,
) -> jax.Array:
    """Send rows to other devices. Rows that no device sends are zeros.

    The gradient is sent back.

    Args:
        x: rows, with any further dims.
        route: the pieces to send.
        lengths: the capacity in rows of the sender and of the receiver.
        axes: mesh axes along which devices exchange rows.
        emulated: gather all rows instead, because XLA:CPU has no ragged all-to-all.
    """
    out, length = route.out, lengths[1]
    if not emulated:
        return jax.lax.ragged_all_to_all(
            x,
            jnp.zeros((length, *x.shape[1:]), x.dtype),
            input_offsets=out.starts,
            send_sizes=out.sizes,
            output_offsets=out.to,
            recv_sizes=out.received,
            axis_name=axes,
        )
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
    is_sent = jnp.any(inside, axis=1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(is_sent, y, 0)


def _travel_forward(x, route: Route, lengths, axes, emulated):
    return travel(x, route, lengths, axes, emulated), route


def _travel_backward(lengths, axes, emulated, route: Route, dy):
    return travel(dy, route.reverse(), lengths[::-1], axes, emulated), None


travel.defvjp(_travel_forward, _travel_backward)
