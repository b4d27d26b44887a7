"""Dropout leaves out random elements, and keeps the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.dropout import drop
from model.execution import CallContext

X_BTD = jnp.ones((4, 8, 64))


def context_with_keys(seed: int) -> CallContext:
    seeds_BT = seed + jnp.arange(32).reshape(4, 8)
    return CallContext(keys_BT=jax.vmap(jax.vmap(jax.random.key))(seeds_BT))


def test_remaining_elements_are_scaled_to_the_same_mean():
    x_BTD = drop(X_BTD, 0.25, "here", context_with_keys(0))
    np.testing.assert_allclose(jnp.unique(x_BTD), [0, 4 / 3], rtol=1e-6)
    assert jnp.mean(x_BTD) == pytest.approx(1, abs=0.05)
    assert drop(X_BTD, 0.0, "here", context_with_keys(0)) is X_BTD
    assert drop(X_BTD, 0.25, "here", CallContext()) is X_BTD


def test_each_place_layer_and_position_drops_different_elements():
    call = context_with_keys(0)
    x_BTD = drop(X_BTD, 0.5, "here", call)
    np.testing.assert_array_equal(x_BTD, drop(X_BTD, 0.5, "here", call))
    variants = [
        drop(X_BTD, 0.5, "there", call),
        drop(X_BTD, 0.5, "here", call.fold_in(1)),
        drop(X_BTD, 0.5, "here", context_with_keys(32)),
        x_BTD[::-1],
        x_BTD[:, ::-1],
    ]
    for variant in variants:
        assert jnp.mean(x_BTD == variant) == pytest.approx(0.5, abs=0.1)
