"""The ring: what one attention over whole rows gives, on any number of devices.

The devices are a dim here, over which `vmap` runs the program of one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import splash, xla
from model.attention.ring import Kernel, in_ring_order, ring

B, N, K, H = 2, 4, 2, 8
AXES = ("context",)
XLA = Kernel(xla.forward, xla.backward)
SPLASH = Kernel(
    partial(splash.forward, interpret=True), partial(splash.backward, interpret=True)
)


def operands(T, H=H, seed=0):
    """Give scaled queries, keys, values and a cotangent, float64 [B, T, heads, H]."""
    drawn = np.random.default_rng(seed)
    q, *others = (drawn.normal(size=(B, T, heads, H)) for heads in (N, K, K, N))
    return [q * H**-0.5, *others]


def documents(T, chunks):
    """Give int32 [B, T]: a row with an end inside every chunk, and a row of one."""
    length = T // chunks
    inside = (np.arange(T) + length // 2) // length + 1
    return np.stack([inside, np.ones(T)]).astype(np.int32)


def plain(q, k, v, ids):
    """Attend by the formula, in float64."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    seen = np.tril(np.ones((T, T), bool))[None]
    seen = seen & (ids[:, :, None] == ids[:, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def around(kernel, c, q, k, v, ids, do):
    """Attend in a ring of c devices; take and give arrays of whole rows.

    Returns:
        The result, and the gradients of q, k and v for its cotangent.
    """

    def on_device(ids, *operands):
        def attend(*operands):
            heads_first = (x.swapaxes(1, 2) for x in operands)
            return ring(kernel, AXES, *heads_first, own(ids)).swapaxes(1, 2)

        def own(x):
            return in_ring_order(x, AXES)

        *operands, do = map(own, operands)
        o, transpose = jax.vjp(attend, *operands)
        return o, *transpose(do)

    def cut(x):  # [c, B, T/c, ...]
        return jnp.moveaxis(x.reshape(B, c, -1, *x.shape[2:]), 1, 0)

    def joined(x):
        chunks = jnp.moveaxis(x.reshape(c, B, 2, -1, *x.shape[3:]), 1, 2)
        chunks = chunks.reshape(2 * c, B, -1, *x.shape[3:])[np.argsort(order)]
        return jnp.moveaxis(chunks, 0, 1).reshape(B, -1, *x.shape[3:])

    order = [chunk for i in range(c) for chunk in (i, 2 * c - 1 - i)]
    parts = jax.vmap(on_device, axis_name="context")(*map(cut, (ids, q, k, v, do)))
    return tuple(map(joined, parts))


def check(kernel, c, T, H=H):
    q, k, v, do = operands(T, H)
    ids = documents(T, 2 * c)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x) for x in (q, k, v)]
        o, transpose = jax.vjp(lambda q, k, v: plain(q, k, v, ids), *wide)
        expected = [np.asarray(x) for x in (o, *transpose(jnp.asarray(do)))]
    q, k, v, do = (jnp.float32(x) for x in (q, k, v, do))
    run = jax.jit(partial(around, kernel, c))
    found = run(q, k, v, jnp.asarray(ids), do)
    for one, right in zip(found, expected, strict=True):
        assert np.linalg.norm(one - right) < 3e-6 * np.linalg.norm(right)


@pytest.mark.parametrize(
    "c",
    [
        pytest.param(2, marks=pytest.mark.slow),
        3,
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
def test_a_ring_is_attention_in_float64(c):
    """Forward and backward; one row ends a document inside of every chunk."""
    check(XLA, c, T=8 * c)


@pytest.mark.slow
@pytest.mark.parametrize("c", [2, 3])
def test_a_ring_of_splash_kernels_is_too(c):
    """With jax's private functions, which are the same in all versions we support."""
    check(SPLASH, c, T=2 * c * 128, H=64)


@pytest.mark.slow
def test_no_query_sees_what_comes_after_it_or_another_document():
    """By gradients: of each query, with respect to all keys and values."""
    c, T = 4, 32
    q, k, v, _ = (jnp.float32(x) for x in operands(T))
    ids = documents(T, 2 * c)

    @jax.jit
    @jax.vmap
    def of_query(do):
        return around(XLA, c, q, k, v, jnp.asarray(ids), do)[2:]

    each = jnp.eye(T)[:, None, :, None, None]  # a cotangent of one query alone
    for gradient in of_query(jnp.broadcast_to(each, (T, *q.shape))):
        for row in range(B):
            found = jnp.abs(gradient[:, row]).sum((2, 3)) > 0
            same = ids[row][:, None] == ids[row][None]
            seen = np.tril(np.ones((T, T), bool)) & same
            # A query alone in its document sees itself with weight 1, whatever its key.
            several = seen.sum(1) > 1
            assert not (found & ~seen).any()
            assert (found | ~seen)[several].all()


def test_devices_get_their_two_chunks():
    rows = jnp.arange(2 * 16).reshape(2, 4, 4).swapaxes(0, 1)  # of four devices
    found = jax.vmap(partial(in_ring_order, axes=AXES), axis_name="context")(rows)
    first = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert found[:, 0].tolist() == first
