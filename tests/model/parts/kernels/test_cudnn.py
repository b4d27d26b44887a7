"""Documents and sinks change what cuDNN's kernel and its backward pass are given."""

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
V = 4
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


def _backward(inputs, mask, window, *, o_BTNV, lse_BNT, do_BTNV):
    """Compute the gradients as the kernel does, from the log-sum-exps it is given."""
    q, k, v, _, _ = inputs
    weights = jnp.exp(_scores(q, k, mask, window) - lse_BNT[..., None])
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    dots = jnp.sum(do_BTNV * o_BTNV, axis=-1).swapaxes(1, 2)
    dweights = jnp.einsum("btnh,bsnh->bnts", do_BTNV, v)
    dscores = weights * (dweights - dots[..., None]) * H**-0.5
    dq = jnp.einsum("bnts,bsnh->btnh", dscores, k)
    dk = jnp.einsum("bnts,btnh->bsnh", dscores, q)
    dv = jnp.einsum("bnts,btnh->bsnh", weights, do_BTNV)
    groups = [x.reshape(B, T, K, N // K, -1).sum(axis=3) for x in (dk, dv)]
    return dq, *groups


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_output_and_all_gradients_equal_those_of_xla(
    kernel, documents, window, has_sinks
):
    rng = np.random.default_rng(0)
    shapes = (N, H), (K, H), (K, V)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, *shape))) for shape in shapes)
    sinks = jnp.asarray(rng.normal(size=N))
    ids = None if documents is None else jnp.asarray(documents)
    visible = masks.causal_mask(
        T, jnp.ones((B, T), jnp.int32) if ids is None else ids, window
    )

    def loss(attend):
        def run(q, k, v, sinks):
            o = attend(Inputs(q, k, v, ids, sinks if has_sinks else None))
            return jnp.sum(jnp.sin(o)), o

        return jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

    ours = loss(lambda inputs: cudnn.attend(inputs, window=window).o_BTNV)
    expected = loss(lambda inputs: attend_masked(inputs, visible, jnp.float64).o_BTNV)
    # XLA's form computes the softmax in float32.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 2e-6), ours, expected
    )
    without = loss(lambda inputs: cudnn.attend(inputs._replace(sinks_N=None)).o_BTNV)
    changes = has_sinks or window is not None
    assert np.allclose(ours[0][1], without[0][1]) != changes
