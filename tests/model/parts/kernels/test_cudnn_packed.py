"""Packed attention passes cuDNN the offsets of documents, and gets the right results.

No GPU is needed. A stand-in reads lengths and offsets as cuDNN documents them, finds
its arrays by these alone, and leaves NaN wherever no document of the call lies.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions
from model.choices import Attention
from model.parts.attention import KernelAttention
from model.parts.kernels import compat, cudnn_packed

pytestmark = pytest.mark.usefixtures("strict")

B = 3
T = 12
N = 4
K = 2
H = 8
DOCUMENTS = np.array(
    [
        [1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 5],  # Five documents take three turns.
        [7] * T,  # One document fills the row.
        [1] * 5 + [2] * 5 + [0] * 2,  # Padding follows the documents.
    ],
    np.int32,
)


def attend_by_offsets(operands, window):
    """Attend inside the documents that lengths and offsets name, by the formula.

    Returns:
        The outputs, the log-sum-exps [D, N, T] of the documents, the mask of the
        log-sum-exps inside a document, and the mask of the positions inside one.
    """
    q, k, v, _, lengths, _, offsets, kv_offsets = operands[:8]
    D = lengths.size
    starts = offsets.ravel()[:D] // (N * H)
    kv_starts = kv_offsets.ravel()[:D] // (K * H)
    position = jnp.arange(B * T)[None]
    length = lengths.reshape(D, 1)
    inside, inside_keys = (
        (position >= start[:, None]) & (position < start[:, None] + length)
        for start in (starts, kv_starts)
    )
    same_document = (inside[:, :, None] & inside_keys[:, None]).any(0)
    distance = position.T - position
    visible = same_document & (distance >= 0) & (distance < (window or T))
    q, k, v = (x.reshape(B * T, -1, H) for x in (q, k, v))
    k, v = (jnp.repeat(x, N // K, 1) for x in (k, v))
    scores = jnp.where(visible[None], jnp.einsum("tnh,snh->nts", q, k) * H**-0.5, -1e30)
    lse = jax.nn.logsumexp(scores, -1)
    o = jnp.einsum("nts,snh->tnh", jnp.exp(scores - lse[..., None]), v)
    indices = jnp.minimum(starts[:, None] + jnp.arange(T)[None], B * T - 1)
    used = (jnp.arange(T)[None] < length)[:, None]
    inside = inside.any(0).reshape(B, T, 1, 1)
    return o.reshape(B, T, N, H), lse[:, indices].swapaxes(0, 1), used, inside


def forward(*operands, is_training, mask_type, scale, sliding_window_length, **_):
    assert (mask_type.name, scale, is_training) == ("PADDING_CAUSAL", H**-0.5, True)
    o, lse, used, inside = attend_by_offsets(operands, sliding_window_length)
    return jnp.where(inside, o, jnp.nan), jnp.where(used, lse, jnp.nan)


def backward(*operands, mask_type, scale, sliding_window_length, **_):
    assert (mask_type.name, scale) == ("PADDING_CAUSAL", H**-0.5)
    lse, o, do = operands[10:]

    def attend(q, k, v):
        o, *aux = attend_by_offsets((q, k, v, *operands[3:]), sliding_window_length)
        return o, aux

    expected_o, pull_back, (expected_lse, used, inside) = jax.vjp(
        attend, *operands[:3], has_aux=True
    )
    error = jnp.where(used, jnp.abs(lse - expected_lse), 0).max()
    error += jnp.where(inside, jnp.abs(o - expected_o), 0).max()
    grads = pull_back(jnp.where(inside, do, 0))
    return [jnp.where(inside & (error < 1e-4), grad, jnp.nan) for grad in grads]


@pytest.fixture
def stand_in(monkeypatch):
    """Replace the two primitives and, for float32, the check of operands."""
    for name, bind in (("fwd", forward), ("bwd", backward)):
        primitive = SimpleNamespace(bind=bind)
        monkeypatch.setattr(compat.fused, f"_dot_product_attention_{name}_p", primitive)
    monkeypatch.setattr(compat.fused, "check_layout", lambda *_: None)


def gradients(kernel, documents, window):
    """Return the gradients for a cotangent that is not constant, and the result."""
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32)
        for heads in (N, K, K)
    ]

    def loss(q, k, v):
        out = KernelAttention(kernel).attend(
            Inputs(q, k, v, documents), AttentionOptions(jnp.float32, window=window)
        )
        return jnp.sum(jnp.sin(out.o_BTNV)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_offsets_give_the_same_attention_as_a_mask(stand_in, window):
    documents = jnp.asarray(DOCUMENTS)
    actual = gradients(Attention.cudnn_packed, documents, window)
    expected = gradients(Attention.xla, documents, window)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def lower_for_gpu(kernel):
    """Return the attention of a layer and its gradient, lowered for an absent GPU."""
    rows = 2
    length = 96

    def loss(*operands):
        method = KernelAttention(kernel)
        out = method.attend(Inputs(*operands), AttentionOptions(jnp.bfloat16))
        return out.o_BTNV.astype(jnp.float32).sum()

    q, k = (
        jax.ShapeDtypeStruct((rows, length, heads, H), jnp.bfloat16) for heads in (N, K)
    )
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_mask_is_built():
    """Each pass has one loop, and each loop one kernel that takes offsets."""
    text = lower_for_gpu(Attention.cudnn_packed)
    assert text.count("stablehlo.while") == 2
    assert (
        text.count('@"__cudnn$fmhaSoftmax"') + text.count("@__cudnn$fmhaSoftmax(") == 1
    )
    assert "96x96" not in text


def test_too_long_rows_are_refused():
    q = jax.ShapeDtypeStruct((4, 2**17, 32, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, 2**17), jnp.int32)
    with pytest.raises(
        ValueError, match=r"2\^31 .*these 4 rows have .* take more microbatch"
    ):
        jax.eval_shape(cudnn_packed.attend, Inputs(q, q, q, ids))
