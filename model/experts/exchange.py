"""Bring tokens to their experts, which may be on other devices.

If a mesh axis (`expert`) shards the experts, devices exchange tokens
(`mesh.expert_exchange`):

all_gather: each device gathers the tokens of all devices, and computes only the rows of
    its local experts. A reduce-scatter sums the results over devices. Buffers must be
    large enough for the worst case, in which all tokens choose one device's experts.
    Therefore tokens are processed in chunks, whose worst case is at most n k rows.
ragged: a ragged all-to-all sends rows to their experts' devices, and another one
    returns the results. If a device would receive more than `_CAPACITY_FACTOR` times
    its equal share, all devices use all_gather instead, so that no token is dropped.

Shapes: B batch, T time, n tokens, k experts per token, R rows, D embed, F an expert's
hidden dim, E experts per device, S devices.
"""

from typing import assert_never

import jax
import jax.numpy as jnp

from model.choices import ExpertExchange, Grouped
from model.experts.local_experts import (
    LocalExperts,
    Output,
    Tokens,
    add_bias,
    run_local_experts,
    run_mlps,
    sort_rows,
)
from model.experts.rows import Route, from_rows, to_rows, travel

# The capacity of a device in rows, divided by its equal share of all rows.
_CAPACITY_FACTOR = 1.5


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
    (n, k), E, axes = tokens.experts.shape, experts.num_local, experts.expert_axes
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
    """Send rows to experts and back; gather instead if a device lacks the capacity."""
    (n, k), E, axes = tokens.experts.shape, experts.num_local, experts.expert_axes
    execution = experts.execution
    S = jax.lax.psum(1, axes)
    row_nk, order, rows_E = sort_rows(tokens.experts, S * E)
    rows_SE = jax.lax.all_gather(rows_E[None], axes, tiled=True)
    worst_case = S * n * min(k, E)
    capacity = min(int(_CAPACITY_FACTOR * n * k), worst_case)
    emulated = execution.grouped is Grouped.scan  # Only CPUs use the scan kernel.

    def send(tokens: Tokens) -> Output:
        route = Route.to_experts(rows_SE, axes)
        x_RD = to_rows(tokens.x, order // k, row_nk)
        weights_R1 = to_rows(
            tokens.weights.reshape(-1, 1), order, row_nk.reshape(-1, 1)
        )
        x_RD, weights_R = (
            jnp.asarray(travel(x, route, (n * k, capacity), axes, emulated))
            for x in (x_RD, weights_R1[:, 0])
        )
        sizes_E = jnp.sum(route.out.received_sizes.reshape(S, E), axis=0)
        output = run_mlps(x_RD, weights_R[:, None], sizes_E, experts)
        y_RD = travel(output.y, route.reverse(), (capacity, n * k), axes, emulated)
        output = output._replace(y=from_rows(y_RD, order // k, row_nk))
        output = experts.reduce(output)
        y_nD = add_bias(output.y, tokens, experts.biases[-1:], execution)
        return output._replace(y=y_nD)

    def gather(tokens: Tokens) -> Output:
        return _run_by_gathering(tokens, experts)

    if capacity == worst_case:
        return send(tokens)
    max_received = jnp.max(jnp.sum(rows_SE.reshape(S, S, E), axis=(0, 2)))
    # All devices must take the same branch, because both branches communicate.
    max_received = jax.lax.pmax(max_received, execution.placement.layer_batch_axes)
    return jax.lax.cond(max_received <= capacity, send, gather, tokens)
