"""Norms compute in float32, and activations save few arrays for the gradient.

test_gpt.py compares the output of a whole block with a reference.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.choices import Activation, Norm
from model.config import ModelConfig
from model.execution import NO_CONTEXT, Execution
from model.layers import MLP, Normalize
from model.placement import ONE_DEVICE

pytestmark = pytest.mark.usefixtures("strict")

CONFIG = ModelConfig(embed_dim=64, num_heads=2)


@pytest.mark.parametrize("kind", Norm)
def test_a_norm_of_bfloat16_is_computed_in_float32(kind):
    norm = Normalize(CONFIG, kind, embed=64)
    x = jax.random.normal(jax.random.key(0), (2, 5, 64), jnp.bfloat16)
    exact = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), exact)


@pytest.mark.parametrize(("kind", "kept"), [("gelu", 2), ("swiglu", 3)])
def test_a_gpu_keeps_an_activation_and_its_inputs_for_the_gradient(kind, kept):
    """No other array, and no derivative, is as wide as the hidden layer."""
    F = 160
    x = jax.random.normal(jax.random.key(0), (2, 5, 64))
    graph, params = nnx.split(
        MLP(replace(CONFIG, activation=Activation(kind)), F, nnx.Rngs(0))
    )

    def derive(platform):
        placement = replace(ONE_DEVICE, platform=platform)
        execution = Execution(placement=placement)
        run = lambda p, x: nnx.merge(graph, p)(x, execution, NO_CONTEXT)  # noqa: E731
        y, pull_back = jax.vjp(run, params, x)
        widths = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
        return pull_back(jnp.sin(y)), widths.count((2, 5, F))

    plain, num_saved_on_cpu = derive("cpu")
    recomputed, num_saved_on_gpu = derive("gpu")
    assert num_saved_on_gpu == kept < num_saved_on_cpu
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        recomputed,
        plain,
    )
