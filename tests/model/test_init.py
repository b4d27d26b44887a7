"""Whole models start with the published spreads, or with silent outputs."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from model.catalog import MODEL_PARTS
from model.choices import Init
from model.gpt import GPT, params_of
from model.params import named

pytestmark = pytest.mark.usefixtures("strict")


def test_gpt2_starts_with_the_published_spreads(composed):
    narrow = "model.embed_dim=384", "model.num_heads=6", "model.vocab_size=8192"
    config = composed(["model=gpt2_124m", *narrow]).model
    params = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0), MODEL_PARTS)))()
    params = jax.tree.map(np.asarray, params)
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
    layers = params["layers"]["0"]["0"]["mlp"]["up"]["weight"]
    assert (layers[0] != layers[1]).mean() > 0.99, "layers must not start alike"


def test_initialisation_with_zeros_starts_silent(llama):
    config = replace(llama.config, init=Init.zero)
    tree = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0), MODEL_PARTS)))()
    params = dict(named(tree))
    silent = {"head.weight", "layers.0.0.attention.output.weight"}
    silent |= {"layers.0.0.mlp.down.weight"}
    assert {name for name, x in params.items() if not x.any()} == silent
    up = params["layers.0.0.mlp.up.weight"]
    assert up.std() == pytest.approx(config.embed_dim**-0.5, rel=0.1)
