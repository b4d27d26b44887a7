"""Sinks change what cuDNN's kernel returns, and what its backward pass is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import masks
from model.attention.inputs import Inputs
from model.attention.xla import attend_masked
from model.parts.kernels import compat, cudnn

B = 2
T = 6
N = 4
K = 2
H = 8
WINDOW = 3
DOCUMENTS = np.array([[1] * 2 + [2] * 4, [1] * 6])


@pytest.fixture
def kernel(monkeypatch):
    """Replace cuDNN's kernel by the same arithmetic in float64."""
    monkeypatch.setattr(compat, "cudnn_attend", _attend)
    monkeypatch.setattr(compat, "cudnn_backward", _backward)
    with jax.enable_x64(True):
        yield


def _scores(q, k, mask, window):
    k = jnp.repeat(k, N // K, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    visible = jnp.tril(jnp.ones((T, T), bool))
    if window is not None:
        visible &= ~jnp.tril(jnp.ones((T, T), bool), -window)
    visible = visible[None, None] if mask is None else visible & mask
    return jnp.where(visible, scores, -jnp.inf)


def _attend(q, k, v, mask, window):
    scores = _scores(q, k, mask, window)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    o = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, N // K, axis=2))
    return o, lse


def _backward(inputs, mask, window, *, o_BTNH, lse_BNT, do_BTNH):
    """Compute the gradients as the kernel does, from the log-sum-exps it is given."""
    q, k, v, _, _ = inputs
    weights = jnp.exp(_scores(q, k, mask, window) - lse_BNT[..., None])
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    dots = jnp.sum(do_BTNH * o_BTNH, axis=-1).swapaxes(1, 2)
    dweights = jnp.einsum("btnh,bsnh->bnts", do_BTNH, v)
    dscores = weights * (dweights - dots[..., None]) * H**-0.5
    dq = jnp.einsum("bnts,bsnh->btnh", dscores, k)
    dk = jnp.einsum("bnts,btnh->bsnh", dscores, q)
    dv = jnp.einsum("bnts,btnh->bsnh", weights, do_BTNH)
    groups = [x.reshape(B, T, K, N // K, H).sum(axis=3) for x in (dk, dv)]
    return dq, *groups


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_sinks_and_all_gradients_equal_those_of_xla(kernel, documents, window):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H))) for heads in (N, K, K))
    sinks = jnp.asarray(rng.normal(size=N))
    ids = None if documents is None else jnp.asarray(documents)
    visible = masks.causal_mask(
        T, jnp.ones((B, T), jnp.int32) if ids is None else ids, window
    )

    def loss(attend):
        def run(q, k, v, sinks):
            o = attend(Inputs(q, k, v, ids, sinks))
            return jnp.sum(jnp.sin(o)), o

        return jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

    ours = loss(lambda inputs: cudnn.attend(inputs, window=window).o_BTNV)
    expected = loss(lambda inputs: attend_masked(inputs, visible, jnp.float64).o_BTNV)
    # XLA's form computes the softmax in float32.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 2e-6), ours, expected
    )
    without = loss(lambda inputs: cudnn.attend(inputs._replace(sinks_N=None)).o_BTNV)
    assert not np.allclose(ours[0][1], without[0][1])
