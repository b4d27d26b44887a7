"""Norms by their properties, initial spreads by formula.

What a whole block computes is held in test_gpt.py, against a reference.
"""

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
def test_a_norm_of_bfloat16_is_computed_in_float32(kind):
    norm = Normalize(CONFIG, kind, embed=64)
    x = jax.random.normal(jax.random.key(0), (2, 5, 64), jnp.bfloat16)
    exact = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), exact)
