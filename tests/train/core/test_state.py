"""What training carries from step to step."""

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
def test_values_that_are_not_finite_are_found_wherever_they_lie(programs, overrides):
    """In the last number of any array, of weights, moments or averages, on any mesh."""
    program = programs(*CUBE, *overrides, devices=8)
    state = jax.tree.map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        program.state,
    )
    not_finite = make_finite_check(program.state, program.mesh)
    assert not_finite(state) == []
    arrays = dict(named(state))
    floating = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(name.startswith("optimizer.") for name in floating)
    chosen = floating[:: max(1, len(floating) // 4)]

    def damaged(path, leaf):
        if jax.tree_util.keystr(path, simple=True, separator=".") not in chosen:
            return leaf
        bad = jnp.zeros(leaf.shape, leaf.dtype).at[(-1,) * leaf.ndim].set(jnp.nan)
        return jax.device_put(bad, leaf.sharding)

    found = not_finite(jax.tree_util.tree_map_with_path(damaged, state))
    assert sorted(found) == sorted(chosen)
