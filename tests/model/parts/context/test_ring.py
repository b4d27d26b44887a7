"""A ring of any number of devices computes the attention over whole rows.

The devices are a dim here, over which `vmap` runs the per-device program.
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


def scale_queries(inputs: Inputs) -> Inputs:
    q = inputs.q_BTNH
    return inputs._replace(q_BTNH=q * q.shape[-1] ** -0.5)


AXES = ("context",)
RING = ContextAttention.ring
INTERPRETED = ModuleType("interpreted")
vars(INTERPRETED).update(
    LENGTH_MULTIPLE=splash.LENGTH_MULTIPLE,
    SCALES_QUERIES=True,  # `attend` and `attend_gathered` below scale them.
    forward=partial(splash.forward, interpret=True),
    backward=partial(splash.backward, interpret=True),
    attend=lambda inputs, **options: splash.attend(
        scale_queries(inputs), interpret=True, **options
    ),
    attend_gathered=lambda inputs, **options: splash.attend_gathered(
        scale_queries(inputs), interpret=True, **options
    ),
)


def gather_keys_values(inputs: Inputs) -> Inputs:
    k, v = (
        splash.gather_positions(x.swapaxes(1, 2), AXES, platform="cpu").swapaxes(1, 2)
        for x in inputs[1:3]
    )
    return inputs._replace(k_BSKH=k, v_BSKV=v)


GATHERED_BEFORE = ModuleType("gathered_before")
vars(GATHERED_BEFORE).update(
    attend=INTERPRETED.attend,
    attend_gathered=lambda inputs, **options: INTERPRETED.attend_gathered(
        gather_keys_values(inputs), **options
    ),
)
SINKS = np.array([0.5, -1, 2, 0])
CAPPED = {"soft_cap": 2.0, "sinks": SINKS}


def operands(T, H=H, seed=0):
    """Return queries, keys, values and a cotangent, float64 [B, T, heads, dim].

    Values and the cotangent have half of the head dim.
    """
    rng = np.random.default_rng(seed)
    dims = ((N, H), (K, H), (K, H // 2), (N, H // 2))
    return [rng.normal(size=(B, T, *heads_and_dim)) for heads_and_dim in dims]


def documents(T, chunks):
    """Return ids, int32 [B, T]. Row 0 ends a document in each chunk. Row 1 is one."""
    length = T // chunks
    ids = (np.arange(T) + length // 2) // length + 1
    return np.stack([ids, np.ones(T)]).astype(np.int32)


def attend_in_ring(kernel, c, q, k, v, sinks, ids, do):
    """Attend on c devices in ring order; arguments and results are whole rows.

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

    def split(x):  # [c, B, T/c, ...]
        return jnp.moveaxis(x.reshape(B, c, -1, *x.shape[2:]), 1, 0)

    def join(x):
        chunks = jnp.moveaxis(x.reshape(c, B, 2, -1, *x.shape[3:]), 1, 2)
        chunks = chunks.reshape(2 * c, B, -1, *x.shape[3:])[np.argsort(order)]
        return jnp.moveaxis(chunks, 0, 1).reshape(B, -1, *x.shape[3:])

    order = [chunk for i in range(c) for chunk in (i, 2 * c - 1 - i)]
    results, dsinks, bound = jax.vmap(on_device, axis_name="context")(
        *map(split, (ids, q, k, v, do))
    )
    return *map(join, results), *([] if dsinks is None else [dsinks[0]]), bound[0]


def check(kernel, c, T, H=H, window=None, soft_cap=None, sinks=None, algorithm=RING):
    q, k, v, do = operands(T, H)
    ids = documents(T, 2 * c)
    with jax.enable_x64(True):
        exact = [None if x is None else jnp.asarray(x) for x in (q, k, v, sinks)]
        visible = mask(T, window)[None] & (ids[:, :, None] == ids[:, None])
        o, transpose = jax.vjp(
            lambda q, k, v, sinks: attend(
                q, k, v, visible[:, None], soft_cap=soft_cap, sinks=sinks
            ),
            *exact,
        )
        grads = transpose(jnp.asarray(do))
        expected = [np.asarray(x) for x in (o, *grads) if x is not None]
    repeated = np.repeat(k, N // K, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, repeated) * H**-0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    bound = np.log((np.exp(scores) * visible[:, None]).sum(-1)).max(axis=(0, 2))
    q, k, v, do = (jnp.float32(x) for x in (q, k, v, do))
    sinks = None if sinks is None else jnp.float32(sinks)
    attention = make_context_parallel_attention(
        algorithm, kernel, AXES, window=window, soft_cap=soft_cap, in_ring_order=True
    )
    actual = jax.jit(partial(attend_in_ring, attention, c))(
        q, k, v, sinks, jnp.asarray(ids), do
    )
    if sinks is None:
        np.testing.assert_allclose(actual[-1], bound, rtol=3e-6)
    for array, expected_array in zip(actual[:-1], expected, strict=True):
        assert np.linalg.norm(array - expected_array) < 3e-6 * np.linalg.norm(
            expected_array
        )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("c", "more"), [slow(2, {}), (3, CAPPED), slow(3, {}), slow(8, {})]
)
def test_a_ring_is_attention_in_float64(c, more):
    """Both passes agree. One row ends a document inside every chunk."""
    check(xla, c, T=8 * c, **more)


@pytest.mark.parametrize(
    ("c", "window", "more"),
    [
        (3, 5, CAPPED),  # It covers the whole previous chunk.
        slow(2, 4, {}),
        slow(4, 1, CAPPED),
        slow(3, 6, CAPPED),  # It reaches further.
        slow(4, 14, {}),
        slow(2, 15, CAPPED),
    ],
)
def test_a_window_in_ring_order_is_attention_in_float64(c, window, more):
    """Each chunk has four positions."""
    check(xla, c, T=8 * c, window=window, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("c", "more"),
    [
        (2, {}),
        (3, CAPPED),
        (2, {"window": 100} | CAPPED),
        (2, {"window": 130}),  # It reaches two chunks back.
    ],
)
def test_a_ring_of_splash_kernels_is_attention_in_float64(c, more):
    """The kernels use private functions of JAX, the same in all supported versions."""
    check(INTERPRETED, c, T=2 * c * 128, H=64, **more)


@pytest.mark.parametrize(
    ("c", "chunk", "more"),
    [(2, 256, {}), slow(3, 128, CAPPED), slow(2, 128, {"window": 100} | CAPPED)],
)
def test_gathered_keys_in_ring_order_give_attention_in_float64(c, chunk, more):
    """Each device computes only the blocks that its queries see."""
    gather = ContextAttention.all_gather
    check(INTERPRETED, c, T=2 * c * chunk, H=64, algorithm=gather, **more)


@pytest.mark.slow
def test_keys_may_be_gathered_before_attention():
    gather = ContextAttention.all_gather
    check(GATHERED_BEFORE, 2, T=2 * 2 * 128, H=64, algorithm=gather)
