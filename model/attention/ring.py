"""A ring of devices that share a row: queries stay, keys and values travel.

Of a row's 2c chunks device i of c holds chunks i and 2c-1-i ("zig-zag"), so that each
has as much to do in each step, whatever the kernel, and no step needs a mask but one:

    step 0: causal over the own chunks, whose order ascends.
    step n, with the keys of device j = i-n mod c: if j < i all queries see the first
        half of those keys; else the second half of the queries sees all of them.

Results of the steps are merged by their log-sum-exps. The backward pass goes round once
more: each step is the kernel's own backward pass, with the merged result and
log-sum-exp, and the gradients of keys and values travel with these until they are home.
What is sent next travels beside the kernel.

Source: Ring Attention, arXiv:2310.01889; the order of chunks: Llama 3,
arXiv:2407.21783, section 3.3.2.

Shapes: B batch, T query time of a device, S key time, N query heads, K key/value heads,
H head dim, c devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.remat import named

Documents = tuple[Int[Array, "B T"], Int[Array, "B S"]] | None


class Kernel(NamedTuple):
    """A kernel that says its log-sum-exp, and takes it back in its backward pass.

    Queries come scaled. Those whose keys are all masked get a log-sum-exp so low that
    their result has no weight.

    forward: (q, k, v, documents, causal) -> (result, log-sum-exp), the latter float32.
    backward: (q, k, v, documents, causal, Result, cotangent) -> what these keys add to
        the gradients of q, k and v, the result being one over more keys.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


class Result(NamedTuple):
    """What queries have seen so far, and the log-sum-exp of their scores."""

    o_BTNH: Float[Array, "B T N H"]
    lse_BNT: Float[Array, "B N T"]

    def merged(self, o_BTNH: Array, lse_BNT: Array) -> "Result":
        """Add other keys' result to that of the last queries."""
        rest = self.lse_BNT.shape[2] - lse_BNT.shape[2]
        before = self.lse_BNT[:, :, rest:]
        lse = jnp.logaddexp(before, lse_BNT)
        o_BTNH = _weigh(self.o_BTNH[:, rest:], before - lse) + _weigh(
            o_BTNH, lse_BNT - lse
        )
        return Result(
            self.o_BTNH.at[:, rest:].set(o_BTNH), self.lse_BNT.at[:, :, rest:].set(lse)
        )


def _weigh(o_BTNH: Array, log_BNT: Array) -> Array:
    return o_BTNH.astype(jnp.float32) * jnp.exp(log_BNT).swapaxes(1, 2)[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(
    kernel: Kernel,
    axes: tuple[str, ...],
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Attend from a device's two chunks to all that come before, in q's dtype.

    Args:
        kernel: that each step runs.
        axes: mesh axes by hand along which devices share rows.
        q_BTNH: scaled queries, rounded; T must be even.
        k_BTKH: keys.
        v_BTKH: values.
        segment_ids_BT: int32 document of each position; None: one document a row.
    """
    return _forward(kernel, axes, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)[0]


def _forward(kernel: Kernel, axes: tuple[str, ...], q, k, v, ids):
    c, i = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    half = q.shape[1] // 2
    o, lse = kernel.forward(q, k, v, _pair(ids, ids), True)

    def early(result: Result, k, v, other) -> Result:
        other = _pair(ids, other, keys=slice(half))
        return result.merged(*kernel.forward(q, k[:, :half], v[:, :half], other, False))

    def late(result: Result, k, v, other) -> Result:
        other = _pair(ids, other, queries=slice(half, None))
        return result.merged(*kernel.forward(q[:, half:], k, v, other, False))

    def step(carry, n):
        result, held = carry
        following = _send(held, axes)
        return (jax.lax.cond(i >= n, early, late, result, *held), following), None

    start = Result(o.astype(jnp.float32), lse), _send((k, v, ids), axes)
    (result, held), _ = jax.lax.scan(step, start, jnp.arange(1, c - 1))
    o, lse = jax.lax.cond(i >= c - 1, early, late, result, *held)
    o, lse = named(o.astype(q.dtype), "attention"), named(lse, "attention")
    return o, (q, k, v, ids, Result(o, lse))


def _backward(kernel: Kernel, axes: tuple[str, ...], residuals, do):
    q, k, v, ids, result = residuals
    c, i = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    half = q.shape[1] // 2
    start = kernel.backward(q, k, v, _pair(ids, ids), True, result, do)

    def early(dq, k, v, other):
        other = _pair(ids, other, keys=slice(half))
        operands = q, k[:, :half], v[:, :half], other, False
        more, *grads = _wide(kernel.backward(*operands, result, do))
        rest = [(0, 0), (0, half), (0, 0), (0, 0)]
        return dq + more, tuple(jnp.pad(grad, rest) for grad in grads)

    def late(dq, k, v, other):
        other = _pair(ids, other, queries=slice(half, None))
        own = Result(result.o_BTNH[:, half:], result.lse_BNT[:, :, half:])
        operands = q[:, half:], k, v, other, False
        more, *grads = _wide(kernel.backward(*operands, own, do[:, half:]))
        return dq.at[:, half:].add(more), tuple(grads)

    def one(dq, held, grads, n):
        arrived = _send(grads, axes)
        dq, more = jax.lax.cond(i >= n, early, late, dq, *held)
        return dq, jax.tree.map(jnp.add, arrived, more)

    def step(carry, n):
        dq, held, grads = carry
        following = _send(held, axes)
        dq, grads = one(dq, held, grads, n)
        return (dq, following, grads), None

    dq, *grads = _wide(start)
    carry = dq, _send((k, v, ids), axes), tuple(grads)
    (dq, held, grads), _ = jax.lax.scan(step, carry, jnp.arange(1, c - 1))
    dq, grads = one(dq, held, grads, c - 1)
    dk, dv = _send(grads, axes)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


ring.defvjp(_forward, _backward)


def _wide(grads: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(grad.astype(jnp.float32) for grad in grads)


def _pair(
    own: Array | None,
    other: Array | None,
    queries: slice = slice(None),
    keys: slice = slice(None),
) -> Documents:
    if own is None or other is None:
        return None
    return own[:, queries], other[:, keys]


def _send(arrays: Any, axes: tuple[str, ...]) -> Any:
    """Hand arrays to the next device of the ring, and take the previous one's."""
    c = jax.lax.psum(1, axes)
    to_next = [(i, (i + 1) % c) for i in range(c)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), arrays)


def in_ring_order(x_BT: Int[Array, "B T"], axes: tuple[str, ...]) -> Int[Array, "B T"]:
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
