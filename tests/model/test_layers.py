"""Norms by their properties, initial spreads by formula.

What a whole block computes is held in test_gpt.py, against a reference.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.choices import Norm
from model.config import ModelConfig
from model.layers import Normalize

pytestmark = pytest.mark.usefixtures("strict")

CONFIG = ModelConfig(embed_dim=64, num_heads=2)


@pytest.mark.parametrize("kind", Norm)
def test_a_norm_gives_unit_scale_whatever_the_input(kind):
    norm = Normalize(replace(CONFIG, bias=True), kind, embed=64)
    x = 3 + 7 * jax.random.normal(jax.random.key(0), (2, 5, 64))
    y = norm(x)
    np.testing.assert_allclose(jnp.mean(y**2, -1), 1, rtol=1e-4)
    np.testing.assert_allclose(norm(100 * x), y, atol=1e-4)
    if kind is Norm.layernorm:
        np.testing.assert_allclose(jnp.mean(y, -1), 0, atol=1e-6)
        np.testing.assert_allclose(norm(x + 5), y, atol=1e-4)
    else:
        assert np.abs(norm(x + 5) - y).max() > 0.1


@pytest.mark.parametrize("kind", Norm)
def test_a_norm_of_bfloat16_is_computed_in_float32(kind):
    norm = Normalize(CONFIG, kind, embed=64)
    x = jax.random.normal(jax.random.key(0), (2, 5, 64), jnp.bfloat16)
    exact = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), exact)
