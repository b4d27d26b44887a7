"""What dropout leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.dropout import drop
from model.execution import CallContext

X_BTD = jnp.ones((4, 8, 64))


def keyed(seed: int) -> CallContext:
    seeds_BT = seed + jnp.arange(32).reshape(4, 8)
    return CallContext(keys_BT=jax.vmap(jax.vmap(jax.random.key))(seeds_BT))


def test_the_rest_is_scaled_to_the_same_mean():
    x_BTD = drop(X_BTD, 0.25, "here", keyed(0))
    np.testing.assert_allclose(jnp.unique(x_BTD), [0, 4 / 3], rtol=1e-6)
    assert jnp.mean(x_BTD) == pytest.approx(1, abs=0.05)
    assert drop(X_BTD, 0.0, "here", keyed(0)) is X_BTD
    assert drop(X_BTD, 0.25, "here", CallContext()) is X_BTD


def test_each_place_layer_and_position_drops_other_elements():
    call = keyed(0)
    x_BTD = drop(X_BTD, 0.5, "here", call)
    np.testing.assert_array_equal(x_BTD, drop(X_BTD, 0.5, "here", call))
    others = [
        drop(X_BTD, 0.5, "there", call),
        drop(X_BTD, 0.5, "here", call.fold_in(1)),
        drop(X_BTD, 0.5, "here", keyed(32)),
        x_BTD[::-1],
        x_BTD[:, ::-1],
    ]
    for other in others:
        assert jnp.mean(x_BTD == other) == pytest.approx(0.5, abs=0.1)
