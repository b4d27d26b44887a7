"""The platform selects an attention kernel, and all kernels compute the same values."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import Mistake
from model.attention import masks, xla
from model.attention.cache import KeysValues, cached_attention
from model.attention.inputs import Chunks, Inputs, Result
from model.attention.method import AttentionOptions
from model.choices import Attention
from model.parts.attention import KernelAttention, choose_kernel
from model.parts.kernels import cudnn, splash
from model.row_max import row_max
from tests.model.reference import attend, mask

pytestmark = pytest.mark.usefixtures("strict")

AUTO, XLA, CUDNN, PACKED, SPLASH = Attention


@pytest.mark.parametrize(
    ("platform", "kernel"),
    [("cpu", XLA), ("tpu", SPLASH), ("gpu", CUDNN), ("cuda", CUDNN), ("rocm", XLA)],
)
def test_auto_selects_the_kernel_of_the_platform(platform, kernel):
    assert choose_kernel(AUTO, platform, 1024, 64) is kernel
    assert choose_kernel(kernel, platform, 1024, 64) is kernel
    assert choose_kernel(XLA, platform, 1000, 63) is XLA


@pytest.mark.parametrize(
    ("kernel", "platform", "length", "head_dim", "reason"),
    [
        (CUDNN, "tpu", 1024, 64, "needs an NVIDIA GPU"),
        (CUDNN, "gpu", 1024, 60, "multiple of 8"),
        (CUDNN, "cuda", 1024, 264, "up to 256"),
        (CUDNN, "gpu", 1023, 64, "even sequence length"),
        (SPLASH, "gpu", 1024, 64, "needs a TPU"),
        (SPLASH, "tpu", 1000, 64, "divisible by 128"),
    ],
)
def test_an_unsuitable_kernel_is_a_mistake(kernel, platform, length, head_dim, reason):
    mistake = choose_kernel(kernel, platform, length, head_dim)
    assert isinstance(mistake, Mistake)
    assert (mistake.key, mistake.value) == ("model.attention", kernel)
    assert re.search(f"{reason}.*model.attention=xla", mistake.rule)
    for feature in ("soft_cap", "sinks"):
        mistake = choose_kernel(PACKED, "cuda", 1024, 64, **{feature: True})
        assert isinstance(mistake, Mistake)
        assert f"attention_{feature}" in mistake.rule


def inputs(kv_heads: int, T: int = 9, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(2, T, heads, 8)), dtype)
        for heads in (4, kv_heads, kv_heads)
    ]


def attend_with(kernel, *operands, sinks_N=None, **options):
    """Return the output of a kernel in float32."""
    rows = Inputs(*operands)._replace(sinks_N=sinks_N)
    options = AttentionOptions(jnp.float32, **options)
    return KernelAttention(kernel).attend(rows, options).o_BTNV


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_xla_attention_equals_that_of_jax(kv_heads, packed):
    q, k, v = inputs(kv_heads)
    ids = [[1] * 3 + [2] * 6, [1] * 8 + [0]]
    documents = jnp.array(ids) if packed else None
    same_document = documents[:, :, None] == documents[:, None] if packed else None

    def our_loss(q, k, v):
        out = attend_with(XLA, q, k, v, documents)
        return jnp.sum(jnp.sin(out)), out

    def jax_loss(q, k, v):
        mask = same_document[:, None] if packed else None
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return jnp.sum(jnp.sin(out)), out

    actual, expected = (
        jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(q, k, v)
        for f in (our_loss, jax_loss)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-7, 2e-6), actual, expected
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_bound_is_the_largest_log_sum_exp_of_scores(window):
    q, k, v = inputs(2)
    documents = jnp.array([[1] * 3 + [2] * 6, [1] * 8 + [0]])
    rows = Inputs(q, k, v, documents)
    options = AttentionOptions(jnp.float32, window=window)
    bounds = KernelAttention(XLA).attend(rows, options).bound_N
    visible = mask(9, window)[None] & (documents[:, :, None] == documents[:, None])
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) * 8**-0.5
    sums = np.where(visible[:, None], np.exp(scores), 0).sum(-1)
    np.testing.assert_allclose(bounds, np.log(sums).max(axis=(0, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    "how", [{}, {"soft_cap": 0.5, "window": 100}, {"sinks": True}, {"drop": True}]
)
def test_blocks_of_queries_attend_to_all_visible_keys(how):
    """The 384 queries form three blocks; without blocks they meet all 400 keys."""
    T = 384
    S = 400
    window = how.get("window")
    q, k, v = inputs(2, S)
    operands = q[:, -T:], k, v
    sinks = SINKS if how.get("sinks") else None
    keep_mask = jnp.asarray(np.random.default_rng(1).random((2, T, 2, 2, S)) < 0.8)
    drop = (lambda ones: jnp.where(keep_mask, ones, 0.0)) if how.get("drop") else None
    mask = masks.causal_mask(T, jnp.ones((2, S), jnp.int32), window)

    def loss(q, k, v, causal):
        options = {"soft_cap": how.get("soft_cap"), "drop": drop}
        inputs = Inputs(q, k, v, sinks_N=sinks)
        attended = xla.attend_masked(
            inputs, mask, jnp.float32, **options, causal=causal
        )
        return jnp.sum(jnp.sin(attended.o_BTNV)), attended

    blocked, unblocked = (
        jax.grad(partial(loss, causal=causal), (0, 1, 2), has_aux=True)(*operands)
        for causal in (True, False)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 2e-6, 2e-6), blocked, unblocked
    )


@pytest.mark.parametrize("size", [1, 31, 96, 4096])
def test_row_max_returns_the_largest_value_or_nan(size):
    rows = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
    rows[1, size // 2] = np.nan
    rows[2, -1] = np.inf
    rows[3] = -np.inf
    largest = row_max(jnp.asarray(rows))
    np.testing.assert_array_equal(largest, rows.max(axis=-1, keepdims=True))


def attend_in_float64(q, k, v, visible):
    """Attend in float64 where `visible` is true."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
        return np.asarray(attend(q, k, v, visible))


SINKS = jnp.asarray([-1.0, 0.0, 2.0, 5.0])


@pytest.mark.parametrize("window", [1, 3, 8, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_the_window_is_the_number_of_keys_that_a_query_sees(window, packed):
    q, k, v = inputs(2)
    documents = jnp.array([[1] * 3 + [2] * 6, [1] * 8 + [0]]) if packed else None
    visible = mask(9, window)[None, None]
    if packed:
        same_document = documents[:, :, None] == documents[:, None]
        visible = visible & np.asarray(same_document)[:, None]
    attend_rows = partial(attend_with, XLA, q, k, v, documents)
    windowed = attend_rows(window=window)
    np.testing.assert_allclose(windowed, attend_in_float64(q, k, v, visible), atol=2e-6)
    for local, expected in ((True, windowed), (False, None)):
        actual = attend_rows(window=window, local_flag=jnp.asarray(local))
        if expected is None:
            expected = attend_rows()
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("features", "sinks_N"),
    [({}, None), ({"window": 3, "soft_cap": 1.0}, SINKS)],
    ids=["all", "local"],
)
def test_attention_to_a_cache_is_attention_to_the_row(features, sinks_N):
    q, k, v = inputs(2)
    expected = attend_with(XLA, q, k, v, None, sinks_N=sinks_N, **features)
    options = AttentionOptions(jnp.float32, **features)
    # Positions that are not yet written hold huge values.
    unwritten = jnp.full((2, 12, 2, 8), jnp.nan_to_num(jnp.inf))
    cache = KeysValues(unwritten, unwritten, jnp.int32(0))
    for start, end in itertools.pairwise((0, 4, 5, 9)):
        cache = cache.append(k[:, start:end], v[:, start:end])
        out = cached_attention(q[:, start:end], cache, options, sinks_N=sinks_N)
        np.testing.assert_allclose(out, expected[:, start:end], atol=2e-6)
    assert cache.length == 9
    np.testing.assert_array_equal(cache.keys[:, :9], k)
    np.testing.assert_array_equal(cache.values[:, :9], v)


@pytest.mark.parametrize("length", [1, 3, 9])
def test_the_row_length_limits_how_far_back_a_cache_is_read(length):
    q, k, v = inputs(2)
    cache = KeysValues(k, v, jnp.int32(9))
    for window in (None, 2):
        options = AttentionOptions(jnp.float32, window=window)
        actual = cached_attention(q, cache, options, length)
        expected = attend_in_float64(
            q, k, v, mask(9, min(length, window or 9))[None, None]
        )
        np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 129, 200])
def test_splash_equals_xla_attention_forward_and_backward(window):
    """The interpreted kernel has blocks of 128 positions, some outside the window."""
    q, k, v = inputs(2, T=384)
    documents = jnp.asarray([[1] * 150 + [2] * 234, [1] * 384])
    options = {"window": window, "soft_cap": 2.0}
    cotangent = jnp.sin(jnp.arange(q.size).reshape(q.shape))

    def splash_loss(q, k, v, sinks):
        attend_interpreted = partial(splash.attend, **options, interpret=True)
        scaled_q = q * q.shape[-1] ** -0.5
        out = attend_interpreted(Inputs(scaled_q, k, v, documents, sinks)).o_BTNV
        return jnp.sum(out * cotangent)

    def xla_loss(q, k, v, sinks):
        out = attend_with(XLA, q, k, v, documents, **options, sinks_N=sinks)
        return jnp.sum(out * cotangent)

    arguments = q, k, v, SINKS
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        actual = jax.value_and_grad(splash_loss, (0, 1, 2, 3))(*arguments)
    expected = jax.value_and_grad(xla_loss, (0, 1, 2, 3))(*arguments)
    for value, expected_value in zip(
        *map(jax.tree.leaves, (actual, expected)), strict=True
    ):
        scale = np.abs(expected_value).max()
        np.testing.assert_allclose(value / scale, expected_value / scale, atol=2e-5)


@pytest.mark.parametrize("kernel", [XLA, CUDNN])
@pytest.mark.parametrize("packed", [False, True])
def test_values_may_have_fewer_dims_than_keys(monkeypatch, kernel, packed):
    """A stand-in for cuDNN's kernel takes a single head dim."""

    def attend_in_one_dim(inputs, **options):
        assert inputs.v_BSKV.shape[-1] == inputs.q_BTNH.shape[-1]
        return xla.attend(inputs, **options)

    monkeypatch.setattr(cudnn, "attend", attend_in_one_dim)
    q, k, v = inputs(2)
    v = v[..., :5]
    documents = jnp.array([[1] * 3 + [2] * 6, [1] * 8 + [0]]) if packed else None
    visible = mask(9, None)[None, None]
    if packed:
        same_document = documents[:, :, None] == documents[:, None]
        visible = visible & np.asarray(same_document)[:, None]
    actual = attend_with(kernel, q, k, v, documents)
    np.testing.assert_allclose(actual, attend_in_float64(q, k, v, visible), atol=2e-6)


def test_a_backward_step_of_a_ring_runs_cudnn():
    """The primitive is private to JAX, and its parameters differ between versions."""

    def run(q, k, v, ids, o, lse, do):
        return cudnn.backward(Chunks(q, k, v, (ids, ids)), False, Result(o, lse), do)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    wide = array(1, 4, 16, 8)
    narrow = array(1, 2, 16, 8)
    ids = array(1, 16, dtype=jnp.int32)
    lse = array(1, 4, 16, dtype=jnp.float32)
    traced = jax.jit(run).trace(wide, narrow, narrow, ids, wide, lse, wide)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaScaleBiasSoftmaxBackward") == 1
