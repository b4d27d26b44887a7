"""A ring of devices that share a row: queries stay, keys and values travel.

Of a row's 2c chunks device i of c holds chunks i and 2c-1-i ("zig-zag"), so that each
has as much to do in each step, whatever the kernel, and no step needs a mask but one:

    step 0: causal over the own chunks, whose order ascends.
    step n, with the keys of device j = i-n mod c: the second chunk of queries sees the
        first of keys; also, if j < i, the first sees the first, else the second the
        second.

Results of the steps are merged by their log-sum-exps. The backward pass goes round once
more: each step is the kernel's own backward pass, with the merged result and
log-sum-exp, and the gradients of keys and values travel with these until they are home.
What is sent next travels beside the kernel.

Source: Ring Attention, arXiv:2310.01889; the order of chunks: Llama 3,
arXiv:2407.21783, section 3.3.2.

Shapes: B batch, T query time of a device, S key time, N query heads, K key/value heads,
H head dim, c devices.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from model.remat import named

Documents = tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
Held = tuple[Array, Array, Array | None]  # keys, values, their documents
Start = Array | int  # of half of the positions


class Kernel(NamedTuple):
    """A kernel that says its log-sum-exp, and takes it back in its backward pass.

    Queries come scaled, heads before positions: that is how kernels lay their operands
    out, so that nothing is moved from step to step. Queries whose keys are all masked
    get a log-sum-exp so low that their result has no weight.

    forward: (q, k, v, documents, causal) -> (result, log-sum-exp), the latter float32.
    backward: (q, k, v, documents, causal, Result, cotangent) -> what these keys add to
        the gradients of q, k and v, the result being one over more keys.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


class Result(NamedTuple):
    """What queries have seen so far, and the log-sum-exp of their scores."""

    o_BNTH: Float[Array, "B N T H"]
    lse_BNT: Float[Array, "B N T"]

    def merged(self, o_BNTH: Array, lse_BNT: Array, start: Start) -> "Result":
        """Add what half of the queries, from `start` on, see of other keys."""
        before = Result(_half(self.o_BNTH, start), _half(self.lse_BNT, start))
        lse = jnp.logaddexp(before.lse_BNT, lse_BNT)
        o_BNTH = _weigh(before.o_BNTH, before.lse_BNT - lse) + _weigh(
            o_BNTH, lse_BNT - lse
        )
        return Result(
            _with_half(self.o_BNTH, o_BNTH, start), _with_half(self.lse_BNT, lse, start)
        )


def _weigh(o_BNTH: Array, log_BNT: Array) -> Array:
    return o_BNTH.astype(jnp.float32) * jnp.exp(log_BNT)[..., None]


def _half(x: Array, start: Start, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, x.shape[axis] // 2, axis)


def _with_half(x: Array, half: Array, start: Start) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, half, start, 2)


def _adding(x: Array, half: Array, start: Start) -> Array:
    return _with_half(x, _half(x, start) + half.astype(x.dtype), start)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(
    kernel: Kernel,
    axes: tuple[str, ...],
    q_BNTH: Float[Array, "B N T H"],
    k_BKTH: Float[Array, "B K T H"],
    v_BKTH: Float[Array, "B K T H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B N T H"]:
    """Attend from a device's two chunks to all that come before, in q's dtype.

    Args:
        kernel: that each step runs.
        axes: mesh axes by hand along which devices share rows.
        q_BNTH: scaled queries, rounded; T must be even.
        k_BKTH: keys.
        v_BKTH: values.
        segment_ids_BT: int32 document of each position; None: one document a row.
        sinks_N: a score of each head of a key whose value is zero; None: none.
    """
    operands = q_BNTH, k_BKTH, v_BKTH, segment_ids_BT, sinks_N
    return _forward(kernel, axes, *operands)[0]


def _forward(kernel: Kernel, axes: tuple[str, ...], q, k, v, ids, sinks):
    c = jax.lax.psum(1, axes)

    def see(result: Result, held: Held, n: Array | int) -> Result:
        for pair in _chunks(n, q, ids, held, axes):
            found = kernel.forward(*pair.operands, False)
            result = result.merged(*found, pair.queries)
        return result

    def step(carry, n):
        result, held = carry
        following = _send(held, axes)
        return (see(result, held, n), following), None

    o, lse = kernel.forward(q, k, v, None if ids is None else (ids, ids), True)
    carry = Result(o.astype(jnp.float32), lse), _send((k, v, ids), axes)
    (result, held), _ = jax.lax.scan(step, carry, jnp.arange(1, c - 1))
    o, lse = see(result, held, c - 1)
    if sinks is not None:  # one key more that all queries have seen
        with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
        o, lse = _weigh(o, lse - with_sink), with_sink
    o, lse = named(o.astype(q.dtype), "attention"), named(lse, "attention")
    return o, (q, k, v, ids, sinks, Result(o, lse))


def _backward(kernel: Kernel, axes: tuple[str, ...], residuals, do):
    q, k, v, ids, sinks, result = residuals
    c = jax.lax.psum(1, axes)

    def see(dq: Array, held: Held, grads: list[Array], n: Array | int):
        dk, dv = _send(grads, axes)
        for pair in _chunks(n, q, ids, held, axes):
            own = Result(*(_half(x, pair.queries) for x in result))
            cotangent = _half(do, pair.queries)
            more = kernel.backward(*pair.operands, False, own, cotangent)
            dq = _adding(dq, more[0], pair.queries)
            dk = _adding(dk, more[1], pair.keys)
            dv = _adding(dv, more[2], pair.keys)
        return dq, [dk, dv]

    def step(carry, n):
        dq, held, grads = carry
        following = _send(held, axes)
        dq, grads = see(dq, held, grads, n)
        return (dq, following, grads), None

    documents = None if ids is None else (ids, ids)
    start = kernel.backward(q, k, v, documents, True, result, do)
    dq, *grads = (grad.astype(jnp.float32) for grad in start)
    carry = dq, _send((k, v, ids), axes), grads
    (dq, held, grads), _ = jax.lax.scan(step, carry, jnp.arange(1, c - 1))
    dq, grads = see(dq, held, grads, c - 1)
    dk, dv = _send(grads, axes)
    grads = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
    return *grads, None, None if sinks is None else _of_sinks(sinks, result, do)


def _of_sinks(sinks_N: Array, result: Result, do_BNTH: Array) -> Array:
    """Return the gradient of sinks: their weight in each query's sum is lost to it."""
    o_BNTH, do_BNTH = (x.astype(jnp.float32) for x in (result.o_BNTH, do_BNTH))
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[:, None] - result.lse_BNT)
    lost_BNT = weight_BNT * jnp.sum(do_BNTH * o_BNTH, axis=-1)
    return -jnp.sum(lost_BNT, axis=(0, 2)).astype(sinks_N.dtype)


ring.defvjp(_forward, _backward)


class _Pair(NamedTuple):
    """A chunk of queries and one of keys that it sees, and where they begin.

    operands: q, k, v and documents of these.
    """

    queries: Start
    keys: Start
    operands: tuple


def _chunks(
    n: Array | int, q: Array, ids: Array | None, held: Held, axes: tuple[str, ...]
) -> Iterator[_Pair]:
    """Yield what meets in step n, with the keys, values and documents `held`."""
    k, v, other = held
    half = q.shape[2] // 2
    earlier = jax.lax.axis_index(axes) >= n
    first_or_second = jnp.where(earlier, 0, half)
    for queries, keys in ((half, 0), (first_or_second, first_or_second)):
        documents = None
        if ids is not None and other is not None:
            documents = _half(ids, queries, 1), _half(other, keys, 1)
        chunks = _half(q, queries), _half(k, keys), _half(v, keys)
        yield _Pair(queries, keys, (*chunks, documents))


def _send(arrays: Any, axes: tuple[str, ...]) -> Any:
    """Hand arrays to the next device of the ring, and take the previous one's."""
    c = jax.lax.psum(1, axes)
    to_next = [(i, (i + 1) % c) for i in range(c)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), arrays)


def in_ring_order(
    x_BT: Shaped[Array, "B T *rest"], axes: tuple[str, ...]
) -> Shaped[Array, "B T *rest"]:
    """Return a device's two chunks of rows, where it holds chunks 2i and 2i+1.

    Everything but attention is position by position, so rows may lie in any order.
    """
    c, i = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    whole = jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)
    size = x_BT.shape[1] // 2
    chunks = [
        jax.lax.dynamic_slice_in_dim(whole, chunk * size, size, axis=1)
        for chunk in (i, 2 * c - 1 - i)
    ]
    return jnp.concatenate(chunks, axis=1)
