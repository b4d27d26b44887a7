"""One door, three kernels: which is taken, and what it computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.cache import KeysValues, cached_attention
from model.attention.kernel import attention, choose
from model.choices import Attention

pytestmark = pytest.mark.usefixtures("strict")

AUTO, XLA, CUDNN, SPLASH = (
    Attention(name) for name in ("auto", "xla", "cudnn", "splash")
)


@pytest.mark.parametrize(
    ("platform", "kernel"),
    [("cpu", XLA), ("tpu", SPLASH), ("gpu", CUDNN), ("cuda", CUDNN), ("rocm", XLA)],
)
def test_auto_takes_the_platforms_own_kernel(platform, kernel):
    assert choose(AUTO, platform, 1024, 64) is kernel
    assert choose(kernel, platform, 1024, 64) is kernel
    assert choose(XLA, platform, 1000, 63) is XLA


@pytest.mark.parametrize(
    ("kernel", "platform", "length", "head_dim", "reason"),
    [
        (CUDNN, "cpu", 1024, 64, "needs an NVIDIA GPU"),
        (CUDNN, "tpu", 1024, 64, "needs an NVIDIA GPU"),
        (CUDNN, "gpu", 1024, 60, "multiple of 8"),
        (CUDNN, "cuda", 1024, 264, "up to 256"),
        (CUDNN, "gpu", 1023, 64, "even sequence length"),
        (SPLASH, "cpu", 1024, 64, "needs a TPU"),
        (SPLASH, "gpu", 1024, 64, "needs a TPU"),
        (SPLASH, "tpu", 1000, 64, "divisible by 128"),
    ],
)
def test_a_kernel_that_cannot_serve_is_an_error(
    kernel, platform, length, head_dim, reason
):
    with pytest.raises(ValueError, match=f"{reason}.*model.attention=xla"):
        choose(kernel, platform, length, head_dim)


@pytest.mark.parametrize(
    ("platform", "length", "head_dim"), [("tpu", 1000, 64), ("gpu", 1024, 60)]
)
def test_auto_does_not_fall_back_silently(platform, length, head_dim):
    with pytest.raises(ValueError, match="slower"):
        choose(AUTO, platform, length, head_dim)


def inputs(kv_heads: int, T: int = 9, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(2, T, heads, 8)), dtype)
        for heads in (4, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_xla_attention_is_jaxs(kv_heads, packed):
    q, k, v = inputs(kv_heads)
    documents = jnp.array([[1] * 3 + [2] * 6, [1] * 8 + [0]]) if packed else None
    same = documents[:, :, None] == documents[:, None] if packed else None

    def ours(q, k, v):
        out = attention(q, k, v, documents, implementation=XLA, compute=jnp.float32)
        return jnp.sum(jnp.sin(out)), out

    def jaxs(q, k, v):
        mask = same[:, None] if packed else None
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return jnp.sum(jnp.sin(out)), out

    found, expected = (
        jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(q, k, v) for f in (ours, jaxs)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected
    )


def test_attention_rounds_operands_and_keeps_the_dtype():
    q, k, v = inputs(2)
    exact = attention(q, k, v, None, implementation=XLA, compute=jnp.float32)
    rounded = attention(q, k, v, None, implementation=XLA, compute=jnp.bfloat16)
    assert rounded.dtype == q.dtype
    assert 1e-4 < np.abs(rounded - exact).max() < 0.05
    q, k, v = inputs(2, dtype=jnp.bfloat16)
    narrow = attention(q, k, v, None, implementation=XLA, compute=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16


def test_attention_to_a_cache_is_attention_to_the_row():
    q, k, v = inputs(2)
    whole = attention(q, k, v, None, implementation=XLA, compute=jnp.float32)
    room = jnp.full((2, 12, 2, 8), jnp.nan_to_num(jnp.inf))  # not yet written: huge
    cache = KeysValues(room, room, jnp.int32(0))
    for start, end in itertools.pairwise((0, 4, 5, 9)):
        cache = cache.append(k[:, start:end], v[:, start:end])
        out = cached_attention(q[:, start:end], cache, jnp.float32)
        np.testing.assert_allclose(out, whole[:, start:end], atol=2e-6)
    assert cache.length == 9
    np.testing.assert_array_equal(cache.keys[:, :9], k)
    np.testing.assert_array_equal(cache.values[:, :9], v)


@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_window_bounds_how_far_a_cache_is_looked_back_into(window):
    q, k, v = inputs(2)
    cache = KeysValues(k, v, jnp.int32(9))
    found = cached_attention(q, cache, jnp.float32, window)
    behind = np.arange(9)[:, None] - np.arange(9)
    expected = jax.nn.dot_product_attention(
        q, k, v, mask=(behind >= 0) & (behind < window)
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)
