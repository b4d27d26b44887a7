"""Bring tokens to their experts, which may be on other devices.

If a mesh axis (`expert`) shards the experts, devices exchange tokens
(`mesh.expert_exchange`):

all_gather: each device gathers the tokens of all devices, and computes only the rows of
    its local experts. A reduce-scatter sums the results over devices. Buffers must be
    large enough for the worst case, in which all tokens choose one device's experts.
    Therefore tokens are processed in chunks, whose worst case is at most n k rows.
ragged: a ragged all-to-all sends tokens to their experts' devices, and another one
    returns the results. A copy of a token serves up to `_EXPERTS_PER_COPY` experts on
    the same device, which adds up their results. If a device would receive more copies
    or rows than `CAPACITY_FACTOR` times its equal share, all devices use all_gather
    instead, so that no token is dropped.
all_to_all: as ragged, but each device sends an equal number of rows to each device,
    `CAPACITY_FACTOR` times an equal share. Rows without a copy are zeros.

Shapes: B batch, T time, n tokens, k experts per token, C copies of tokens, m experts
per copy, R rows, P rows of a piece, D embed, F an expert's hidden dim, E experts per
device, S devices.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp

from model.choices import ExpertExchange, Grouped
from model.config import ModelConfig
from model.parts.experts.local_experts import (
    LocalExperts,
    Output,
    Tokens,
    add_bias,
    run_local_experts,
    sort_rows,
)
from model.parts.experts.rows import (
    Route,
    cut_into_pieces,
    from_rows,
    swap_pieces,
    to_rows,
    travel,
)

# The capacity of a device, in copies and in rows, divided by its equal share of them.
CAPACITY_FACTOR = 1.5
# More experts for each copy would send little less, and a device needs memory for a row
# of each copy and place (docs/log).
_EXPERTS_PER_COPY = 3


def run_on_device(tokens: Tokens, experts: LocalExperts) -> Output:
    """Run a device's local tokens [B, T, ...] through the experts of all devices."""
    flat = Tokens._make(x.reshape(-1, x.shape[-1]) for x in tokens)
    match experts.execution.expert_exchange:
        case ExpertExchange.all_gather | ExpertExchange.auto:
            output = _run_by_gathering(flat, experts)
        case ExpertExchange.ragged | ExpertExchange.all_to_all:
            # Gathering communicates nothing if each device has all experts.
            run = _run_by_sending if experts.expert_axes else _run_by_gathering
            output = run(flat, experts)
        case _:
            assert_never(experts.execution.expert_exchange)
    return output._replace(y=output.y.reshape(tokens.x.shape))


def _run_by_gathering(tokens: Tokens, experts: LocalExperts) -> Output:
    """Gather the tokens of all devices, in chunks, and reduce-scatter the results."""
    n, k = tokens.experts.shape
    E = experts.num_local
    axes = experts.expert_axes
    worst_k = jax.lax.psum(1, axes) * min(k, E)  # the most rows per local token
    num_chunks = next(c for c in range(-(-worst_k // k), n + 1) if n % c == 0)

    def run_chunk(chunk: Tokens) -> Output:
        if axes:
            gathered = (jax.lax.all_gather(x, axes, tiled=True) for x in chunk)
            chunk = Tokens._make(gathered)
        first_expert = E * jax.lax.axis_index(axes) if axes else 0
        chunk = chunk._replace(experts=chunk.experts - first_expert)
        output = experts.reduce(run_local_experts(chunk, experts))
        y_nD = add_bias(output.y, chunk, experts.local_biases[-1:], experts.execution)
        y_nD = jax.lax.psum_scatter(y_nD, axes, tiled=True) if axes else y_nD
        return output._replace(y=y_nD)

    if num_chunks == 1:
        return run_chunk(tokens)
    # The gradients of the chunks are added up in the dtype of the matrices.
    sum_dtype = experts.execution.numerics.reduce_dtype
    matrices = [w.astype(sum_dtype) for w in experts.matrices]
    experts = experts._replace(matrices=matrices)
    chunked = [x.reshape(num_chunks, n // num_chunks, x.shape[-1]) for x in tokens]
    y, counts = jax.lax.map(jax.checkpoint(run_chunk), Tokens._make(chunked))
    counts = jax.tree.map(lambda c: jnp.sum(c, axis=0), counts)
    return Output(y.reshape(tokens.x.shape), counts)


class _Journey(NamedTuple):
    """How copies of tokens travel to the devices of their experts, and back.

    choice_R: the choice of each row that a device sends.
    row_nk: the sent row of each choice, or an index behind the last row.
    send, send_back: functions of rows; the rows that arrive are sorted by device.
    """

    choice_R: jax.Array
    row_nk: jax.Array
    send: Callable[[jax.Array], jax.Array]
    send_back: Callable[[jax.Array], jax.Array]


def _run_by_sending(tokens: Tokens, experts: LocalExperts) -> Output:
    """Send tokens to experts and back; gather if a device lacks the capacity."""
    n, k = tokens.experts.shape
    E = experts.num_local
    axes = experts.expert_axes
    execution = experts.execution
    S = jax.lax.psum(1, axes)
    m = min(k, E, _EXPERTS_PER_COPY)
    max_piece = n * -(-min(k, E) // m)
    max_rows = S * n * min(k, E)
    share = CAPACITY_FACTOR * n * _expected_copies(experts.config, S, m)
    has_pieces = execution.expert_exchange is ExpertExchange.all_to_all
    P = min(math.ceil(share / S), max_piece)
    C = S * P if has_pieces else min(round(share), S * max_piece)
    R = min(round(CAPACITY_FACTOR * n * k), max_rows)
    device_nk = tokens.experts // E
    copy_device_nk, served = _make_copies(device_nk, S, m)
    copy_nk, order, copies_S = sort_rows(copy_device_nk, S)
    copies_SS = jax.lax.all_gather(copies_S[None], axes, tiled=True)

    def send(tokens: Tokens) -> Output:
        if has_pieces:
            pieces = cut_into_pieces(order, copy_nk, copy_device_nk, copies_S, P)
            journey = _journey_in_pieces(pieces, axes)
        else:
            journey = _ragged_journey(order[:C], copy_nk, copies_SS, C, experts)
        # Zero stands for no expert. float32 holds the numbers exactly.
        labels = [
            jnp.sum(jnp.where(served_kkn, x_nk.T[None], 0), axis=1)
            for x_nk in (tokens.experts + 1.0, tokens.weights)
            for served_kkn in served
        ]
        labels = jnp.stack(labels, axis=-1).swapaxes(0, 1).reshape(n * k, 2 * m)
        choice_R = journey.choice_R
        row_nk = journey.row_nk
        x_CD = journey.send(to_rows(tokens.x, choice_R // k, row_nk))
        labels = journey.send(to_rows(labels, choice_R, row_nk.reshape(-1, 1)))
        numbers, weights = jnp.split(labels, 2, axis=-1)
        numbers = numbers.astype(jnp.int32) - 1 - E * jax.lax.axis_index(axes)
        received = Tokens(x_CD, numbers, weights)
        output = run_local_experts(received, experts, capacity=R)
        y_nD = from_rows(journey.send_back(output.y), choice_R // k, row_nk)
        output = experts.reduce(output._replace(y=y_nD))
        y_nD = add_bias(output.y, tokens, experts.biases[-1:], execution)
        return output._replace(y=y_nD)

    def gather(tokens: Tokens) -> Output:
        return _run_by_gathering(tokens, experts)

    is_worst_case_small = (S * max_piece, max_rows) == (C, R)
    if is_worst_case_small:
        return send(tokens)
    rows_S = jnp.sum(device_nk[..., None] == jnp.arange(S)[None, None], axis=(0, 1))
    if has_pieces:
        excess_S = jnp.max(copies_SS, axis=0) - P
    else:
        sums = jnp.sum(copies_SS, axis=0), jnp.sum(copies_SS, axis=1)
        excess_S = jnp.maximum(*sums) - C
    excess_S = jnp.maximum(excess_S, jax.lax.psum(rows_S, axes) - R)
    # All devices must take the same branch, because both branches communicate.
    excess = jax.lax.pmax(jnp.max(excess_S), execution.placement.layer_batch_axes)
    # The backward pass computes again what the branch needs that was taken. Otherwise
    # the forward pass would save the arrays of both branches.
    branches = jax.checkpoint(send), jax.checkpoint(gather)
    return jax.lax.cond(excess <= 0, *branches, tokens)


def _journey_in_pieces(
    pieces: tuple[jax.Array, jax.Array, jax.Array], axes: tuple[str, ...]
) -> _Journey:
    """Return a journey of the results of `cut_into_pieces`, one for each device."""
    choice_R, row_nk, is_used_R1 = pieces
    return _Journey(
        choice_R,
        row_nk,
        lambda x: swap_pieces(jnp.where(is_used_R1, x, 0), axes),
        lambda y: swap_pieces(y, axes),
    )


def _ragged_journey(
    choice_R: jax.Array,
    row_nk: jax.Array,
    copies_SS: jax.Array,
    capacity: int,
    experts: LocalExperts,
) -> _Journey:
    """Return a journey in which devices receive up to `capacity` rows in all."""
    axes = experts.expert_axes
    route = Route.to_devices(copies_SS, axes)
    capacities = (choice_R.size, capacity)
    # Only CPUs use the scan kernel.
    emulated = experts.execution.grouped is Grouped.scan
    return _Journey(
        choice_R,
        row_nk,
        lambda x: travel(x, route, capacities, axes, emulated),
        lambda y: travel(y, route.reverse(), capacities[::-1], axes, emulated),
    )


def _make_copies(
    device_nk: jax.Array, num_devices: int, m: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Make a copy of a token for every m choices of experts on the same device.

    Returns:
        The device of each copy [n, k], or `num_devices` for no copy; and for each of m
        places whether copy c of a token serves choice i in this place, [c, i, n].
    """
    k = device_nk.shape[1]
    device_kn = device_nk.T
    is_same_kkn = device_kn[:, None] == device_kn[None]
    # A token has the copy c if m divides the number of earlier choices of its device.
    is_earlier_kk1 = jnp.tri(k, k, -1, dtype=bool)[..., None]
    earlier_kn = jnp.sum(is_same_kkn & is_earlier_kk1, axis=1)
    place_kkn = earlier_kn[None] - earlier_kn[:, None]
    served = [is_same_kkn & (place_kkn == place) for place in range(m)]
    return jnp.where(earlier_kn.T % m == 0, device_nk, num_devices), served


def _expected_copies(config: ModelConfig, devices: int, m: int) -> float:
    """Return the expected number of a token's copies if choices are independent.

    A token only reaches the devices of the groups that its router keeps.
    """
    k = config.experts_per_token
    groups = config.router_groups
    if groups > 1:
        devices_per_group = -(-devices // groups)
        devices = min(devices, config.router_groups_kept * devices_per_group)
    p = 1 / devices
    probabilities = (math.comb(k, b) * p**b * (1 - p) ** (k - b) for b in range(k + 1))
    return devices * sum(-(-b // m) * q for b, q in enumerate(probabilities))
