"""How tokens meet their experts, which may lie on other devices.

Where experts lie apart along a mesh axis (`expert`) devices exchange tokens
(`mesh.expert_exchange`):

all_gather: devices gather the tokens of all, compute the rows of their own experts
    alone, and add up over devices by a scatter. That takes room for the worst case, all
    tokens to one device's experts; so tokens go in chunks, as many as keep that room
    below what one device's own tokens take.
ragged: rows travel to their experts' devices and back, once. Where a device would get
    more than `ROOM` times as many as if all got the same, all devices do as above
    instead: nothing is dropped.

Shapes: B batch, T time, n tokens, k experts of each, R rows, D embed, F an expert's
hidden dim, E experts of a device, S devices.
"""

import math
from collections.abc import Sequence
from typing import assert_never

import jax
import jax.numpy as jnp

from model.choices import ExpertExchange, Grouped
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.experts.local_experts import (
    HeldExperts,
    Made,
    local_experts,
    mlps,
    sorted_rows,
    with_bias,
)
from model.experts.rows import from_rows, pieces, to_rows, travel
from model.scopes import in_branch

# Rows that a device has room for, over those that it gets if all get as many.
ROOM = 1.5


def on_device(
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    weights_BTk: jax.Array,
    matrices: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    config: ModelConfig,
    execution: Execution,
    call: CallContext,
    apart: tuple[str, ...],
    shared: tuple[str, ...],
) -> Made:
    """Run a device's own tokens through the experts of all.

    Args:
        x_BTD: own tokens.
        experts_BTk: that they chose, of all devices' experts.
        weights_BTk: of these.
        matrices: of the device's own experts: up, gate if there is one, down.
        biases: of all experts, likewise; or none.
        config: of the model.
        execution: how the program runs.
        call: the context of this call.
        apart: mesh axes along which devices have other tokens and other experts.
        shared: mesh axes along which devices share each expert.

    Returns:
        What becomes of own tokens; and what float8 loses of all rows (model/taps.py),
        if somebody watches.
    """
    n = math.prod(x_BTD.shape[:-1])
    arrays = x_BTD, experts_BTk, weights_BTk
    x_nD, experts_nk, weights_nk = (a.reshape(n, a.shape[-1]) for a in arrays)
    held = HeldExperts(
        matrices=matrices,
        biases=biases,
        config=config,
        execution=execution,
        call=call,
        apart=apart,
        shared=shared,
    )
    match execution.expert_exchange:
        case ExpertExchange.ragged if apart:
            run = _by_sending
        case ExpertExchange.ragged | ExpertExchange.all_gather | ExpertExchange.auto:
            run = _by_gathering  # of one device's experts neither sends anything
        case _:
            assert_never(execution.expert_exchange)
    y_nD, counts = run(x_nD, experts_nk, weights_nk, held)
    return y_nD.reshape(x_BTD.shape), counts


def _by_gathering(
    x_nD: jax.Array, experts_nk: jax.Array, weights_nk: jax.Array, held: HeldExperts
) -> Made:
    """Gather the tokens of all, in chunks, and scatter the results."""
    (n, k), E, apart = experts_nk.shape, held.number, held.apart
    worst = jax.lax.psum(1, apart) * min(k, E)
    chunks = next(c for c in range(-(-worst // k), n + 1) if n % c == 0)

    def chunk(*own: jax.Array) -> Made:
        def of_all(own: jax.Array) -> jax.Array:
            return jax.lax.all_gather(own, apart, tiled=True) if apart else own

        first = E * jax.lax.axis_index(apart) if apart else 0
        x_nD, experts_nk, weights_nk = map(of_all, own)
        choice = experts_nk - first, weights_nk
        y_nD, counts = local_experts(x_nD, *choice, held)
        y_nD, counts = held.added_up(y_nD, counts)
        y_nD = with_bias(y_nD, *choice, held.own_biases[-1:], held.execution)
        y_nD = jax.lax.psum_scatter(y_nD, apart, tiled=True) if apart else y_nD
        return y_nD, counts

    flat = x_nD, experts_nk, weights_nk
    if chunks == 1:
        return chunk(*flat)
    cut = [a.reshape(chunks, n // chunks, a.shape[-1]) for a in flat]
    again = jax.checkpoint(chunk)
    y, counts = jax.lax.map(lambda own: again(*own), cut)
    return y.reshape(x_nD.shape), jax.tree.map(lambda c: jnp.sum(c, axis=0), counts)


def _by_sending(
    x_nD: jax.Array, experts_nk: jax.Array, weights_nk: jax.Array, held: HeldExperts
) -> Made:
    """Send rows to their experts' devices and back, if there is room on all."""
    (n, k), E, apart, execution = (
        experts_nk.shape,
        held.number,
        held.apart,
        held.execution,
    )
    devices = jax.lax.psum(1, apart)
    row_nk, order, rows_E = sorted_rows(experts_nk, devices * E)
    rows_SE = jax.lax.all_gather(rows_E[None], apart, tiled=True)
    worst = devices * n * min(k, E)
    room = min(int(ROOM * n * k), worst)

    def send(x_nD: jax.Array, weights_nk: jax.Array) -> Made:
        out, back = pieces(rows_SE, apart)
        way = apart, execution.grouped is Grouped.scan  # the body of CPUs
        x_RD = to_rows(x_nD, order // k, row_nk)
        weights_R1 = to_rows(weights_nk.reshape(-1, 1), order, row_nk.reshape(-1, 1))
        x_RD, weights_R = (
            travel(x, out, back, (n * k, room), *way) for x in (x_RD, weights_R1[:, 0])
        )
        sizes_E = jnp.sum(out.received.reshape(devices, E), axis=0)
        y_RD, counts = mlps(x_RD, weights_R[:, None], sizes_E, n * k, held)
        y_RD = travel(y_RD, back, out, (room, n * k), *way)
        y_nD = from_rows(y_RD, order // k, row_nk)
        y_nD, counts = held.added_up(y_nD, counts)
        return with_bias(
            y_nD, experts_nk, weights_nk, held.biases[-1:], execution
        ), counts

    def gather(x_nD: jax.Array, weights_nk: jax.Array) -> Made:
        return _by_gathering(x_nD, experts_nk, weights_nk, held)

    if room == worst:
        return send(x_nD, weights_nk)
    most = jnp.max(jnp.sum(rows_SE.reshape(devices, devices, E), axis=(0, 2)))
    most = jax.lax.pmax(most, execution.placement.layer_batch_axes)  # all do the same
    branches = in_branch(send, 1, 1), in_branch(gather, 0, 1)
    return jax.lax.cond(most <= room, *branches, x_nD, weights_nk)
