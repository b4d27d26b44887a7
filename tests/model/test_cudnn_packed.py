"""Documents by offsets: what cuDNN is told, and what comes of doing as it is told.

No GPU is here: a stand-in reads lengths and offsets as cuDNN documents them, finds its
arrays by these alone, and leaves nonsense wherever no document of the call lies.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import compat
from model.attention import cudnn_packed
from model.attention.inputs import Inputs
from model.attention.kernel import attention
from model.choices import Attention

pytestmark = pytest.mark.usefixtures("strict")

B, T, N, K, H = 3, 12, 4, 2, 8
DOCUMENTS = np.array(
    [
        [1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 5],  # three turns of two
        [7] * T,  # one document, as long as the row
        [1] * 5 + [2] * 5 + [0] * 2,  # padding behind them
    ],
    np.int32,
)


class CuDNN:
    """The two primitives by the formula, on documents found by their offsets."""

    def __init__(self):
        self.turns = 0

    def _documents(self, q, k, operands, how):
        """Give each document's positions of all rows, and what its queries see."""
        lengths, kv_lengths, offsets, kv_offsets = operands[4:8]
        assert how["mask_type"].name == "PADDING_CAUSAL"
        assert how["scale"] == H**-0.5
        length = lengths.ravel()
        np.testing.assert_array_equal(length, kv_lengths.ravel())
        start = offsets.ravel()[: len(length) + 1]
        kv_start = kv_offsets.ravel()[: len(length) + 1]
        assert (np.diff(start) >= 0).all()
        assert start[-1] == q.size
        assert kv_start[-1] == k.size
        assert not (start % (N * H)).any()
        start, kv_start = start // (N * H), kv_start // (K * H)
        np.testing.assert_array_equal(start, kv_start)
        window = how["sliding_window_length"] or T
        for document, (first, size) in enumerate(zip(start, length, strict=False)):
            behind = np.arange(size)[:, None] - np.arange(size)
            seen = (behind >= 0) & (behind < window)
            yield document, slice(first, first + size), np.where(seen, 0, -np.inf)

    def _scores(self, q, k, where, mask):
        rows = [x.reshape(-1, *x.shape[2:])[where] for x in (q, k)]
        rows[1] = np.repeat(rows[1], N // K, axis=1)
        return np.einsum("tnh,snh->nts", *rows) * H**-0.5 + mask, rows

    def forward(self, *operands, **how):
        q, k, v = operands[:3]
        self.turns += 1
        o = np.full((B * T, N, H), np.nan)
        stats = np.full((operands[4].size, N, T), np.nan)
        for document, where, mask in self._documents(q, k, operands, how):
            scores, _ = self._scores(q, k, where, mask)
            lse = np.log(np.exp(scores).sum(-1))
            values = np.repeat(v.reshape(B * T, K, H)[where], N // K, axis=1)
            o[where] = np.einsum(
                "nts,snh->tnh", np.exp(scores - lse[..., None]), values
            )
            stats[document, :, : lse.shape[1]] = lse
        return o.reshape(q.shape).astype(q.dtype), stats.astype(np.float32)

    def backward(self, *operands, **how):
        (q, k, v), (stats, o, do) = operands[:3], operands[10:]
        dq = np.full((B * T, N, H), np.nan)
        dk, dv = np.full((2, B * T, K, H), np.nan)
        for document, where, mask in self._documents(q, k, operands, how):
            scores, (queries, keys) = self._scores(q, k, where, mask)
            length = scores.shape[1]
            weights = np.exp(scores - stats[document, :, :length, None])
            results, cotangents = (x.reshape(B * T, N, H)[where] for x in (o, do))
            values = np.repeat(v.reshape(B * T, K, H)[where], N // K, axis=1)
            dot = np.einsum("tnh,tnh->nt", results, cotangents)[..., None]
            slopes = np.einsum("tnh,snh->nts", cotangents, values) - dot
            slopes *= weights * H**-0.5
            dq[where] = np.einsum("nts,snh->tnh", slopes, keys)
            grouped = (length, K, N // K, H)
            dk[where] = (
                np.einsum("nts,tnh->snh", slopes, queries).reshape(grouped).sum(2)
            )
            summed = np.einsum("nts,tnh->snh", weights, cotangents)
            dv[where] = summed.reshape(grouped).sum(2)
        return [
            grad.reshape(x.shape).astype(x.dtype)
            for grad, x in zip((dq, dk, dv), (q, k, v), strict=True)
        ]


@pytest.fixture
def cudnn(monkeypatch):
    """Run the stand-in on the host, where its primitives are bound."""
    stand_in = CuDNN()

    def bound(run, shapes):
        def bind(*operands, **how):
            how.pop("is_training", None)
            return jax.pure_callback(
                lambda *arrays: run(*map(np.asarray, arrays), **how),
                shapes(*operands),
                *operands,
            )

        return type("Primitive", (), {"bind": staticmethod(bind)})

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def results(q, *operands):
        stats = jax.ShapeDtypeStruct((operands[3].size, N, T), jnp.float32)
        return like(q), stats

    fused = compat.fused
    forward = bound(stand_in.forward, results)
    backward = bound(stand_in.backward, lambda *o: [like(x) for x in o[:3]])
    monkeypatch.setattr(fused, "_dot_product_attention_fwd_p", forward)
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_p", backward)
    monkeypatch.setattr(fused, "check_layout", lambda *_: None)  # float32 for once
    return stand_in


def gradients(kernel, documents, window):
    """Give the result, and the gradients for a cotangent that is not constant."""
    drawn = np.random.default_rng(0)
    operands = [
        jnp.asarray(drawn.normal(size=(B, T, heads, H)), jnp.float32)
        for heads in (N, K, K)
    ]

    def loss(q, k, v):
        out = attention(
            *(q, k, v, documents),
            implementation=kernel,
            compute=jnp.float32,
            window=window,
        )
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_documents_by_offsets_are_documents_by_mask(cudnn, window):
    documents = jnp.asarray(DOCUMENTS)
    found = gradients(Attention.cudnn_packed, documents, window)
    expected = gradients(Attention.xla, documents, window)
    assert cudnn.turns == 3
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def lowered(kernel):
    """Lower one layer's attention with its gradient for a GPU that is not here."""
    rows, length = 2, 96

    def loss(*operands):
        how = {"implementation": kernel, "compute": jnp.bfloat16}
        return attention(*operands, **how).astype(jnp.float32).sum()

    q, k = (
        jax.ShapeDtypeStruct((rows, length, heads, H), jnp.bfloat16) for heads in (N, K)
    )
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_mask_is_built():
    """One loop forward, one backward, in each one kernel that is told offsets."""
    text = lowered(Attention.cudnn_packed)
    assert text.count("stablehlo.while") == 2
    assert (
        text.count('@"__cudnn$fmhaSoftmax"') + text.count("@__cudnn$fmhaSoftmax(") == 1
    )
    assert "96x96" not in text


def test_too_long_rows_are_refused():
    q = jax.ShapeDtypeStruct((4, 2**17, 32, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, 2**17), jnp.int32)
    with pytest.raises(ValueError, match=r"2\^31 .*these 4 rows; take more microbatch"):
        jax.eval_shape(cudnn_packed.attend, Inputs(q, q, q, ids))
