"""The state of training is checked for values that are not finite."""

import jax
import jax.numpy as jnp
import pytest

from model.params import named
from tests.train.conftest import CUBE
from train.core.state import make_finite_check


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.ema_decay=0.9", "optimizer.offload=true"),
    ],
    ids=["plain", "offloaded"],
)
def test_values_that_are_not_finite_are_found_in_any_array(programs, overrides):
    """The value is the last number of an array of weights, moments or averages."""
    program = programs([*CUBE, *overrides], devices=8)
    state = jax.tree.map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        program.state,
    )
    not_finite = make_finite_check(program.state, program.mesh)
    assert not_finite(state) == []
    arrays = dict(named(state))
    floating = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(name.startswith("optimizer.") for name in floating)
    damaged_names = floating[:: max(1, len(floating) // 4)]

    def damage(path, leaf):
        if jax.tree_util.keystr(path, simple=True, separator=".") not in damaged_names:
            return leaf
        bad = jnp.zeros(leaf.shape, leaf.dtype).at[(-1,) * leaf.ndim].set(jnp.nan)
        return jax.device_put(bad, leaf.sharding)

    names = not_finite(jax.tree_util.tree_map_with_path(damage, state))
    assert sorted(names) == sorted(damaged_names)
