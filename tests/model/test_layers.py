"""Norms and rotary positions by their properties, initial spreads by formula.

What a whole block computes is held in test_gpt.py, against a reference.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.choices import Init, Norm
from model.config import ModelConfig
from model.layers import Normalize, rotate, rotation, stds

pytestmark = pytest.mark.usefixtures("strict")

CONFIG = ModelConfig(embed_dim=64, num_heads=2)


def turned(x, start: int, config: ModelConfig = CONFIG):
    positions = start + jnp.arange(x.shape[1])[None]
    return rotate(x, rotation(positions, config))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_scores_depend_on_the_distance_only(fraction):
    config = replace(CONFIG, rotary_fraction=fraction)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 32))

    def scores(q_start, k_start):
        return jnp.einsum(
            "btnh,bsnh->bnts", turned(q, q_start, config), turned(k, k_start, config)
        )

    np.testing.assert_allclose(scores(0, 0), scores(100, 100), atol=2e-4)
    assert np.abs(scores(0, 0) - scores(5, 0)).max() > 0.1


def test_rotary_keeps_lengths_and_leaves_position_zero():
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 32))
    np.testing.assert_array_equal(turned(x, 0)[:, 0], x[:, 0])
    pairs = jnp.hypot(x[..., :16], x[..., 16:])
    after = turned(x, 7)
    np.testing.assert_allclose(
        jnp.hypot(after[..., :16], after[..., 16:]), pairs, rtol=1e-5
    )


def test_rotary_turns_the_pairs_at_the_published_rates():
    x = jnp.zeros((1, 1, 1, 32)).at[..., :16].set(1.0)
    after = turned(x, 3)[0, 0, 0]
    rates = 10000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(after[:16], np.cos(3 * rates), atol=1e-6)
    np.testing.assert_allclose(after[16:], np.sin(3 * rates), atol=1e-6)


def test_a_rotary_fraction_leaves_the_rest_untouched():
    config = replace(CONFIG, rotary_fraction=0.3)
    assert config.rotary_dim == 8
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 32))
    after = turned(x, 1, config)
    np.testing.assert_array_equal(after[..., 8:], x[..., 8:])
    assert (after[..., :8] != x[..., :8]).all()


def test_rotary_angles_of_late_positions_are_exact_in_bfloat16_too():
    x = jnp.zeros((1, 1, 1, 32), jnp.bfloat16).at[..., :16].set(1.0)
    after = turned(x, 10_001)
    angles = 10_001 * 10000.0 ** (-np.arange(16) / 16)
    expected = np.concatenate([np.cos(angles), np.sin(angles)])
    assert after.dtype == jnp.bfloat16
    np.testing.assert_allclose(after[0, 0, 0].astype(jnp.float32), expected, atol=0.01)


@pytest.mark.parametrize("kind", Norm)
def test_a_norm_gives_unit_scale_whatever_the_input(kind):
    norm = Normalize(replace(CONFIG, bias=True), 64, "embed", kind)
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
    norm = Normalize(CONFIG, 64, "embed", kind)
    x = jax.random.normal(jax.random.key(0), (2, 5, 64), jnp.bfloat16)
    exact = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), exact)


def test_only_a_layernorm_with_bias_has_one():
    def bias(kind, biased):
        return Normalize(replace(CONFIG, bias=biased), 64, "embed", kind).bias

    assert bias(Norm.layernorm, True).shape == (64,)
    assert bias(Norm.layernorm, False) is None
    assert bias(Norm.rmsnorm, True) is None


@pytest.mark.parametrize(
    ("init", "inside", "residual"),
    [
        (Init.gpt2, 0.02, 0.02 / math.sqrt(24)),
        (Init.scaled, 0.125, 0.125 / math.sqrt(24)),
        (Init.zero, 0.125, 0.0),
    ],
)
def test_initial_spreads(init, inside, residual):
    config = replace(CONFIG, init=init, num_layers=12)
    assert stds(config, 64) == pytest.approx((inside, residual))
