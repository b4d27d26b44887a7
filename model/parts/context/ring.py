"""Ring attention: devices share a row; queries stay, keys and values travel.

A row is divided into 2c chunks. Device i of c has chunks i and 2c-1-i ("zig-zag").
Every device then has the same amount of work in each step, and only one step needs a
causal mask:

    step 0: causal attention within the device's chunks, which are in ascending order.
    step n, with the keys of device j = i-n mod c: the second chunk of queries sees the
        first chunk of keys. Also, if j < i, the first chunk of queries sees the first
        chunk of keys; otherwise, the second chunk of queries sees the second of keys.

The results of the steps are merged by their log-sum-exps. The backward pass goes around
the ring again: each step is the kernel's own backward pass, with the merged result and
log-sum-exp. The gradients of keys and values travel with the keys and values until they
return to their device. While the kernel runs, the next keys and values are sent.

Source: Ring Attention, arXiv:2310.01889; the order of chunks: Llama 3,
arXiv:2407.21783, section 3.3.2.

Shapes: B batch, T local query time, S local key time, N query heads, K key/value heads,
H head dim, V value dim, c devices.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from model.attention.inputs import Result, sinks_gradient
from model.parts.context.ring_kernel import Kernel, Pair, Travelling
from model.remat import saveable

Start = Array | int  # The first local position of one of a device's two chunks.


def _take_half_result(result: Result, start: Start) -> Result:
    """Return the result of half of the queries."""
    return Result(_take_half(result.o_BNTV, start), _take_half(result.lse_BNT, start))


def _merge(result: Result, other: Result, start: Start) -> Result:
    """Merge `other` into the half of `result` from position `start` on.

    `other` is the result of the same queries over other keys.
    """
    old = _take_half_result(result, start)
    lse_BNT = jnp.logaddexp(old.lse_BNT, other.lse_BNT)
    o_BNTV = _weigh(old, lse_BNT) + _weigh(other, lse_BNT)
    return Result(
        _replace_half(result.o_BNTV, o_BNTV, start),
        _replace_half(result.lse_BNT, lse_BNT, start),
    )


def _weigh(result: Result, lse_BNT: Array) -> Array:
    """Return a result's share of the merged result, whose log-sum-exp is `lse_BNT`."""
    share_BNT = jnp.exp(result.lse_BNT - lse_BNT)
    return result.o_BNTV.astype(jnp.float32) * share_BNT[..., None]


def _take_half(x: Array, start: Start, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, x.shape[axis] // 2, axis)


def _replace_half(x: Array, half: Array, start: Start) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, half, start, 2)


def _add_to_half(x: Array, half: Array, start: Start) -> Array:
    return _replace_half(x, _take_half(x, start) + half.astype(x.dtype), start)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(
    kernel: Kernel,
    axes: tuple[str, ...],
    q_BNTH: Float[Array, "B N T H"],
    local: Travelling,
    sinks_N: Float[Array, "N"] | None = None,
    weight: Float[Array, "..."] | None = None,
) -> Result:
    """Attend from a device's two chunks to all earlier positions, in the dtype of q.

    Queries are scaled, T is even, and q and what travels have the compute dtype.
    Devices share rows over the manual mesh axes `axes`. `local` holds what travels from
    the device's own chunks. `weight` is the operand of `kernel.expand`. The
    log-sum-exps have no gradient.
    """
    return _forward(kernel, axes, q_BNTH, local, sinks_N, weight=weight)[0]


def _forward(
    kernel: Kernel, axes: tuple[str, ...], q, local: Travelling, sinks, weight
):
    c = jax.lax.psum(1, axes)

    def attend_step(result: Result, received: Travelling, n: Array | int) -> Result:
        for query_start, _, pair in _pairs(n, q, local, received, axes):
            result = _merge(result, kernel.attend(weight, pair, False), query_start)
        return result

    def step(carry, n):
        result, received = carry
        next_received = _send(received, axes)
        return (attend_step(result, received, n), next_received), None

    result = kernel.attend(weight, _local_pair(q, local), True)
    result = result._replace(o_BNTV=result.o_BNTV.astype(jnp.float32))
    initial = result, _send(local, axes)
    (result, received), _ = jax.lax.scan(step, initial, jnp.arange(1, c - 1))
    result = attend_step(result, received, c - 1)
    o, lse = result
    if sinks is not None:  # A sink is one more key that all queries see.
        lse = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
        o = _weigh(result, lse)
    o = saveable(o.astype(q.dtype), "attention")
    lse = saveable(lse, "attention")
    return Result(o, lse), (q, local, sinks, weight, Result(o, lse))


def _backward(kernel: Kernel, axes: tuple[str, ...], residuals, cotangents: Result):
    q, local, sinks, weight, result = residuals
    do, _ = cotangents
    c = jax.lax.psum(1, axes)

    def differentiate_step(
        dq: Array, dweight, received: Travelling, grads: list[Array], n: Array | int
    ):
        grads = _send(grads, axes)
        for query_start, key_start, pair in _pairs(n, q, local, received, axes):
            half_result = _take_half_result(result, query_start)
            half_do = _take_half(do, query_start)
            chunk_dq, chunk_dweight, chunk_grads = kernel.differentiate(
                weight, pair, False, half_result, half_do
            )
            dq = _add_to_half(dq, chunk_dq, query_start)
            dweight = jax.tree.map(jnp.add, dweight, chunk_dweight)
            grads = [
                _add_to_half(grad, chunk_grad, key_start)
                for grad, chunk_grad in zip(grads, chunk_grads, strict=True)
            ]
        return dq, dweight, grads

    def step(carry, n):
        dq, dweight, received, grads = carry
        next_received = _send(received, axes)
        dq, dweight, grads = differentiate_step(dq, dweight, received, grads, n)
        return (dq, dweight, next_received, grads), None

    local_grads = kernel.differentiate(weight, _local_pair(q, local), True, result, do)
    dq, dweight, grads = jax.tree.map(lambda x: x.astype(jnp.float32), local_grads)
    initial = dq, dweight, _send(local, axes), [*grads]
    (dq, dweight, received, grads), _ = jax.lax.scan(
        step, initial, jnp.arange(1, c - 1)
    )
    dq, dweight, grads = differentiate_step(dq, dweight, received, grads, c - 1)
    grads = _send(grads, axes)
    grads = [d.astype(x.dtype) for d, x in zip(grads, local.arrays, strict=True)]
    dweight = None if weight is None else dweight.astype(weight.dtype)
    dsinks = None if sinks is None else sinks_gradient(sinks, result, do)
    return dq.astype(q.dtype), Travelling(tuple(grads), None), dsinks, dweight


ring.defvjp(_forward, _backward)


def _local_pair(q: Array, local: Travelling) -> Pair:
    ids = local.segment_ids_BT
    return Pair(q, local.arrays, None if ids is None else (ids, ids))


def _pairs(
    n: Array | int,
    q: Array,
    local: Travelling,
    received: Travelling,
    axes: tuple[str, ...],
) -> Iterator[tuple[Start, Start, Pair]]:
    """Yield (query start, key start, pair) for each pair of chunks of step n.

    `received` is what the device has received for this step.
    """
    half = q.shape[2] // 2
    documents = None
    is_from_earlier_device = jax.lax.axis_index(axes) >= n
    common_start = jnp.where(is_from_earlier_device, 0, half)
    starts = (half, 0), (common_start, common_start)
    for query_start, key_start in starts:
        if local.segment_ids_BT is not None and received.segment_ids_BT is not None:
            documents = (
                _take_half(local.segment_ids_BT, query_start, 1),
                _take_half(received.segment_ids_BT, key_start, 1),
            )
        arrays = [_take_half(x, key_start) for x in received.arrays]
        pair = Pair(_take_half(q, query_start), arrays, documents)
        yield query_start, key_start, pair


def _send(arrays: Any, axes: tuple[str, ...]) -> Any:
    """Send arrays to the next device of the ring; return those of the previous one."""
    c = jax.lax.psum(1, axes)
    to_next = [(i, (i + 1) % c) for i in range(c)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), arrays)


def in_ring_order(
    x_BT: Shaped[Array, "B T *rest"], axes: tuple[str, ...]
) -> Shaped[Array, "B T *rest"]:
    """Return chunks i and 2c-1-i of the rows, for device i of the ring.

    x_BT has chunks 2i and 2i+1. All layers except attention treat each position
    independently, so that the positions of a row may be in any order.
    """
    c = jax.lax.psum(1, axes)
    i = jax.lax.axis_index(axes)
    rows = jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)
    size = x_BT.shape[1] // 2
    chunks = [
        jax.lax.dynamic_slice_in_dim(rows, chunk * size, size, axis=1)
        for chunk in (i, 2 * c - 1 - i)
    ]
    return jnp.concatenate(chunks, axis=1)
