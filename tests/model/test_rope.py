"""Rotary positions have the properties that define them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.choices import RopeScaling, Scaling
from model.config import ModelConfig
from model.rope import Rotation, frequencies, make_rotations, rotate

pytestmark = pytest.mark.usefixtures("strict")

CONFIG = ModelConfig(embed_dim=64, num_heads=2)


def rotate_from(x, start: int, config: ModelConfig = CONFIG):
    positions = start + jnp.arange(x.shape[1])[None]
    return rotate(x, make_rotations(positions, config).for_layer(False))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_scores_depend_on_the_distance_only(fraction):
    config = replace(CONFIG, rotary_fraction=fraction)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 32))

    def scores(q_start, k_start):
        return jnp.einsum(
            "btnh,bsnh->bnts",
            rotate_from(q, q_start, config),
            rotate_from(k, k_start, config),
        )

    np.testing.assert_allclose(scores(0, 0), scores(100, 100), atol=2e-4)
    assert np.abs(scores(0, 0) - scores(5, 0)).max() > 0.1


def test_rotary_turns_the_pairs_at_the_published_rates():
    x = jnp.zeros((1, 1, 1, 32)).at[..., :16].set(1.0)
    rotated = rotate_from(x, 3)[0, 0, 0]
    rates = 10000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(rotated[:16], np.cos(3 * rates), atol=1e-6)
    np.testing.assert_allclose(rotated[16:], np.sin(3 * rates), atol=1e-6)


def test_rotary_angles_of_late_positions_are_exact_in_bfloat16_too():
    x = jnp.zeros((1, 1, 1, 32), jnp.bfloat16).at[..., :16].set(1.0)
    rotated = rotate_from(x, 10_001)
    angles = 10_001 * 10000.0 ** (-np.arange(16) / 16)
    expected = np.concatenate([np.cos(angles), np.sin(angles)])
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        rotated[0, 0, 0].astype(jnp.float32), expected, atol=0.01
    )


LLAMA3 = RopeScaling(Scaling.llama3, factor=8.0, original_length=8192)
YARN = RopeScaling(Scaling.yarn, factor=16.0, original_length=4096)


@pytest.mark.parametrize(("scaling", "fast"), [(LLAMA3, 4), (YARN, 32)])
def test_fast_pairs_are_kept_and_slow_ones_slowed_by_the_factor(scaling, fast):
    unscaled = np.asarray(frequencies(128, 500_000.0, RopeScaling()), np.float64)
    scaled = np.asarray(frequencies(128, 500_000.0, scaling), np.float64)
    turns = scaling.original_length * unscaled / (2 * np.pi)
    ratio = scaled / unscaled
    assert (np.diff(ratio) < 1e-6).all()
    # The bounds of yarn are whole pairs, so a pair just beyond one is scaled in part.
    np.testing.assert_allclose(ratio[turns > 1.3 * fast], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / scaling.factor, rtol=1e-6)
    middle = ratio[(turns < 0.8 * fast) & (turns > 1.3)]
    assert len(middle) > 3
    assert ((middle < 0.99) & (middle > 1.01 / scaling.factor)).all()


def test_linear_scaling_slows_positions():
    config = replace(CONFIG, rope_scaling=RopeScaling(Scaling.linear, factor=4.0))
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, 32))
    np.testing.assert_allclose(rotate_from(x, 12, config), rotate_from(x, 3), atol=1e-6)


def test_yarn_sharpens_attention():
    config = replace(CONFIG, rope_scaling=YARN)
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 32))
    ratio = jnp.linalg.norm(rotate_from(x, 5, config)) / jnp.linalg.norm(x)
    assert ratio == pytest.approx(0.1 * np.log(16) + 1)


def test_local_layers_may_have_a_base_of_their_own_and_are_not_scaled():
    config = replace(CONFIG, rope_scaling=LLAMA3, rope_theta_local=100.0)
    positions = jnp.arange(6)[None]
    rotations = make_rotations(positions, config)
    expected = make_rotations(positions, replace(CONFIG, rope_theta=100.0)).for_layer(
        False
    )
    for local in (True, jnp.asarray(True)):
        jax.tree.map(
            np.testing.assert_array_equal, rotations.for_layer(local), expected
        )
    assert np.abs(rotations.for_layer(False).cos - expected.cos).max() > 0.1
    flagged = rotations.for_layer(jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, flagged, rotations.for_layer(False))


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_the_gradient_of_a_rotation_is_the_opposite_rotation(rotary_dim):
    """<R v, dy> equals <v, R^T dy>. A scale of the rotation, like yarn's, stays."""
    rng = np.random.default_rng(0)
    v, dy = rng.normal(size=(2, 1, 5, 2, 8)).astype(np.float32)
    angles = rng.normal(size=(1, 5, 1, rotary_dim // 2)).astype(np.float32)
    rotation = Rotation(1.5 * jnp.cos(angles), 1.5 * jnp.sin(angles))
    rotated, transpose = jax.vjp(lambda x: rotate(x, rotation), jnp.asarray(v))
    (dx,) = transpose(jnp.asarray(dy))
    np.testing.assert_allclose(np.sum(rotated * dy), np.sum(v * dx), rtol=1e-5)
    np.testing.assert_array_equal(dx[..., rotary_dim:], dy[..., rotary_dim:])
