"""The ring: what one attention over whole rows gives, on any number of devices.

The devices are a dim here, over which `vmap` runs the program of one.
"""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import xla
from model.attention.inputs import Inputs
from model.choices import ContextAttention
from model.parts.context.context_parallel import make_context_parallel_attention
from model.parts.context.ring import in_ring_order
from model.parts.kernels import splash
from tests.model.reference import attend, mask

B = 2
N = 4
K = 2
H = 8


def scaled(inputs: Inputs) -> Inputs:
    q = inputs.q_BTNH
    return inputs._replace(q_BTNH=q * q.shape[-1] ** -0.5)


AXES = ("context",)
RING = ContextAttention.ring
INTERPRETED = ModuleType("interpreted")
vars(INTERPRETED).update(
    LENGTH_MULTIPLE=splash.LENGTH_MULTIPLE,
    SCALES_QUERIES=True,  # `attend` and `attend_gathered` below scale them
    forward=partial(splash.forward, interpret=True),
    backward=partial(splash.backward, interpret=True),
    attend=lambda inputs, **more: splash.attend(scaled(inputs), interpret=True, **more),
    attend_gathered=lambda inputs, **more: splash.attend_gathered(
        scaled(inputs), interpret=True, **more
    ),
)


def gathered(inputs: Inputs) -> Inputs:
    k, v = (
        splash.gather_positions(x.swapaxes(1, 2), AXES, platform="cpu").swapaxes(1, 2)
        for x in inputs[1:3]
    )
    return inputs._replace(k_BSKH=k, v_BSKV=v)


GATHERED_BEFORE = ModuleType("gathered_before")
vars(GATHERED_BEFORE).update(
    attend=INTERPRETED.attend,
    attend_gathered=lambda inputs, **more: INTERPRETED.attend_gathered(
        gathered(inputs), **more
    ),
)
SINKS = np.array([0.5, -1, 2, 0])
CAPPED = {"soft_cap": 2.0, "sinks": SINKS}


def operands(T, H=H, seed=0):
    """Give queries, keys, values and a cotangent, float64 [B, T, heads, dim].

    Values, and so the cotangent, have half of the others' dim.
    """
    drawn = np.random.default_rng(seed)
    dims = ((N, H), (K, H), (K, H // 2), (N, H // 2))
    return [drawn.normal(size=(B, T, *heads_and_dim)) for heads_and_dim in dims]


def documents(T, chunks):
    """Give int32 [B, T]: a row with an end inside every chunk, and a row of one."""
    length = T // chunks
    inside = (np.arange(T) + length // 2) // length + 1
    return np.stack([inside, np.ones(T)]).astype(np.int32)


def around(kernel, c, q, k, v, sinks, ids, do):
    """Attend on c devices in a ring's order; take and give arrays of whole rows.

    Returns:
        The result, the gradients of q, k, v and sinks for its cotangent, and the bound.
    """

    def on_device(ids, q, k, v, do):
        *operands, do, ids = (in_ring_order(x, AXES) for x in (q, k, v, do, ids))
        o, transpose, bound = jax.vjp(
            lambda q, k, v, sinks: tuple(kernel(Inputs(q, k, v, ids, sinks))),
            *operands,
            sinks,
            has_aux=True,
        )
        *grads, dsinks = transpose(do)
        dsinks = None if sinks is None else jax.lax.psum(dsinks, AXES)
        return (o, *grads), dsinks, jax.lax.pmax(bound, AXES)

    def cut(x):  # [c, B, T/c, ...]
        return jnp.moveaxis(x.reshape(B, c, -1, *x.shape[2:]), 1, 0)

    def joined(x):
        chunks = jnp.moveaxis(x.reshape(c, B, 2, -1, *x.shape[3:]), 1, 2)
        chunks = chunks.reshape(2 * c, B, -1, *x.shape[3:])[np.argsort(order)]
        return jnp.moveaxis(chunks, 0, 1).reshape(B, -1, *x.shape[3:])

    order = [chunk for i in range(c) for chunk in (i, 2 * c - 1 - i)]
    parts, dsinks, bound = jax.vmap(on_device, axis_name="context")(
        *map(cut, (ids, q, k, v, do))
    )
    return *map(joined, parts), *([] if dsinks is None else [dsinks[0]]), bound[0]


def check(kernel, c, T, H=H, window=None, soft_cap=None, sinks=None, algorithm=RING):
    q, k, v, do = operands(T, H)
    ids = documents(T, 2 * c)
    with jax.enable_x64(True):
        wide = [None if x is None else jnp.asarray(x) for x in (q, k, v, sinks)]
        seen = mask(T, window)[None] & (ids[:, :, None] == ids[:, None])
        o, transpose = jax.vjp(
            lambda q, k, v, sinks: attend(
                q, k, v, seen[:, None], soft_cap=soft_cap, sinks=sinks
            ),
            *wide,
        )
        grads = transpose(jnp.asarray(do))
        expected = [np.asarray(x) for x in (o, *grads) if x is not None]
    repeated = np.repeat(k, N // K, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, repeated) * H**-0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    bound = np.log((np.exp(scores) * seen[:, None]).sum(-1)).max(axis=(0, 2))
    q, k, v, do = (jnp.float32(x) for x in (q, k, v, do))
    sinks = None if sinks is None else jnp.float32(sinks)
    own = make_context_parallel_attention(
        algorithm, kernel, AXES, window=window, soft_cap=soft_cap, in_ring_order=True
    )
    found = jax.jit(partial(around, own, c))(q, k, v, sinks, jnp.asarray(ids), do)
    if sinks is None:
        np.testing.assert_allclose(found[-1], bound, rtol=3e-6)
    for one, right in zip(found[:-1], expected, strict=True):
        assert np.linalg.norm(one - right) < 3e-6 * np.linalg.norm(right)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("c", "more"), [slow(2, {}), (3, CAPPED), slow(3, {}), slow(8, {})]
)
def test_a_ring_is_attention_in_float64(c, more):
    """Forward and backward; one row ends a document inside of every chunk."""
    check(xla, c, T=8 * c, **more)


@pytest.mark.parametrize(
    ("c", "window", "more"),
    [
        (3, 5, CAPPED),  # reaches over the whole chunk before
        slow(2, 4, {}),
        slow(4, 1, CAPPED),
        slow(3, 6, CAPPED),  # further
        slow(4, 14, {}),
        slow(2, 15, CAPPED),
    ],
)
def test_so_is_a_window_in_a_rings_order(c, window, more):
    """Chunks are of four positions."""
    check(xla, c, T=8 * c, window=window, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("c", "more"),
    [
        (2, {}),
        (3, CAPPED),
        (2, {"window": 100} | CAPPED),
        (2, {"window": 130}),  # reaches two chunks back
    ],
)
def test_a_ring_of_splash_kernels_is_too(c, more):
    """With jax's private functions, which are the same in all versions we support."""
    check(INTERPRETED, c, T=2 * c * 128, H=64, **more)


@pytest.mark.parametrize(
    ("c", "chunk", "more"),
    [(2, 256, {}), slow(3, 128, CAPPED), slow(2, 128, {"window": 100} | CAPPED)],
)
def test_gathered_keys_in_a_rings_order_are_too(c, chunk, more):
    """Each device computes only the blocks that its queries see."""
    gather = ContextAttention.all_gather
    check(INTERPRETED, c, T=2 * c * chunk, H=64, algorithm=gather, **more)


@pytest.mark.slow
def test_keys_may_be_gathered_before():
    gather = ContextAttention.all_gather
    check(GATHERED_BEFORE, 2, T=2 * 2 * 128, H=64, algorithm=gather)
