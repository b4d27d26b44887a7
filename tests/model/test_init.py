"""How whole models start: the published spreads and loss, and in silence."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.choices import Init
from model.execution import Execution
from model.gpt import GPT, abstract_gpt, bind, params_of
from model.params import named

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture(scope="module")
def gpt2(composed):
    """The published initialisation, of a narrower model."""
    narrow = "model.embed_dim=384", "model.num_heads=6", "model.vocab_size=8192"
    config = composed("model=gpt2_124m", *narrow).model
    params = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0))))()
    return config, jax.tree.map(np.asarray, params)


def test_gpt2_starts_with_the_published_spreads(gpt2):
    config, params = gpt2
    into_residual = 0.02 / math.sqrt(2 * config.num_layers)
    for name, x in named(params):
        if name.endswith("scale"):
            assert (x == 1).all(), name
        elif name.endswith("bias"):
            assert (x == 0).all(), name
        else:
            narrow = "output" in name or "down" in name
            expected = into_residual if narrow else 0.02
            layers = (
                x.reshape(12, -1) if name.startswith("layers") else x.reshape(1, -1)
            )
            np.testing.assert_allclose(layers.std(1), expected, rtol=0.01, err_msg=name)
            assert abs(layers.mean()) < expected / 100, name
    layers = params["layers"]["mlp"]["up"]["weight"]
    assert (layers[0] != layers[1]).mean() > 0.99, "layers must not start alike"


def test_gpt2_starts_at_the_loss_of_a_guess(gpt2):
    config, params = gpt2
    model, execution = abstract_gpt(config), Execution()
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(1, 65))

    @jax.jit
    def loss(params, tokens):
        bound = bind(model, params)
        x, *_ = bound.features(tokens[:, :-1], jnp.arange(64)[None], None, execution)
        logp = jax.nn.log_softmax(bound.logits(x, execution))
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], -1))

    assert loss(params, tokens) == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_initialisation_with_zeros_starts_silent(llama):
    config = replace(llama.config, init=Init.zero)
    born = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0))))()
    params = dict(named(born))
    silent = {"head.weight", "layers.attention.output.weight", "layers.mlp.down.weight"}
    assert {name for name, x in params.items() if not x.any()} == silent
    up = params["layers.mlp.up.weight"]
    assert up.std() == pytest.approx(config.embed_dim**-0.5, rel=0.1)
