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

Shapes: B batch, T time, n tokens, k experts per token, C copies of tokens, m experts
per copy, R rows, D embed, F an expert's hidden dim, E experts per device, S devices.
"""

import math
from typing import assert_never

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
from model.parts.experts.rows import Route, from_rows, to_rows, travel

# The capacity of a device, in copies and in rows, divided by its equal share of them.
CAPACITY_FACTOR = 1.5
# More experts for each copy would send little less, and a device needs memory for a row
# of each copy and place (docs/log).
_EXPERTS_PER_COPY = 3


def run_on_device(tokens: Tokens, experts: LocalExperts) -> Output:
    """Run a device's local tokens [B, T, ...] through the experts of all devices."""
    flat = Tokens._make(x.reshape(-1, x.shape[-1]) for x in tokens)
    match experts.execution.expert_exchange:
        case ExpertExchange.ragged if experts.expert_axes:
            output = _run_by_sending(flat, experts)
        case ExpertExchange.ragged | ExpertExchange.all_gather | ExpertExchange.auto:
            # Gathering communicates nothing if each device has all experts.
            output = _run_by_gathering(flat, experts)
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
    # The gradients of the chunks are added up, in float32.
    experts = experts._replace(
        matrices=[w.astype(jnp.float32) for w in experts.matrices]
    )
    chunked = [x.reshape(num_chunks, n // num_chunks, x.shape[-1]) for x in tokens]
    y, counts = jax.lax.map(jax.checkpoint(run_chunk), Tokens._make(chunked))
    counts = jax.tree.map(lambda c: jnp.sum(c, axis=0), counts)
    return Output(y.reshape(tokens.x.shape), counts)


def _run_by_sending(tokens: Tokens, experts: LocalExperts) -> Output:
    """Send tokens to experts and back; gather if a device lacks the capacity."""
    n, k = tokens.experts.shape
    E = experts.num_local
    axes = experts.expert_axes
    execution = experts.execution
    S = jax.lax.psum(1, axes)
    m = min(k, E, _EXPERTS_PER_COPY)
    max_copies = S * n * -(-min(k, E) // m)
    max_rows = S * n * min(k, E)
    share = n * _expected_copies(experts.config, S, m)
    C = min(round(CAPACITY_FACTOR * share), max_copies)
    R = min(round(CAPACITY_FACTOR * n * k), max_rows)
    emulated = execution.grouped is Grouped.scan  # Only CPUs use the scan kernel.
    device_nk = tokens.experts // E
    copy_device_nk, served = _make_copies(device_nk, S, m)
    copy_nk, order, copies_S = sort_rows(copy_device_nk, S)
    order = order[:C]
    copies_SS = jax.lax.all_gather(copies_S[None], axes, tiled=True)

    def send(tokens: Tokens) -> Output:
        route = Route.to_devices(copies_SS, axes)
        capacities = (order.size, C)
        # Zero stands for no expert. float32 holds the numbers exactly.
        labels = [
            jnp.sum(jnp.where(served_kkn, x_nk.T[None], 0), axis=1)
            for x_nk in (tokens.experts + 1.0, tokens.weights)
            for served_kkn in served
        ]
        labels = jnp.stack(labels, axis=-1).swapaxes(0, 1).reshape(n * k, 2 * m)
        sent = (
            to_rows(tokens.x, order // k, copy_nk),
            to_rows(labels, order, copy_nk.reshape(-1, 1)),
        )
        x_CD, labels = (
            jnp.asarray(travel(x, route, capacities, axes, emulated)) for x in sent
        )
        numbers, weights = jnp.split(labels, 2, axis=-1)
        numbers = numbers.astype(jnp.int32) - 1 - E * jax.lax.axis_index(axes)
        received = Tokens(x_CD, numbers, weights)
        output = run_local_experts(received, experts, capacity=R)
        y_CD = travel(output.y, route.reverse(), capacities[::-1], axes, emulated)
        output = output._replace(y=from_rows(y_CD, order // k, copy_nk))
        output = experts.reduce(output)
        y_nD = add_bias(output.y, tokens, experts.biases[-1:], execution)
        return output._replace(y=y_nD)

    def gather(tokens: Tokens) -> Output:
        return _run_by_gathering(tokens, experts)

    if (max_copies, max_rows) == (C, R):
        return send(tokens)
    rows_S = jnp.sum(device_nk[..., None] == jnp.arange(S)[None, None], axis=(0, 1))
    most_copies_S = jnp.maximum(jnp.sum(copies_SS, axis=0), jnp.sum(copies_SS, axis=1))
    excess_S = jnp.maximum(most_copies_S - C, jax.lax.psum(rows_S, axes) - R)
    # All devices must take the same branch, because both branches communicate.
    excess = jax.lax.pmax(jnp.max(excess_S), execution.placement.layer_batch_axes)
    return jax.lax.cond(excess <= 0, send, gather, tokens)


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
