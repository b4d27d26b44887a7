"""Make small training states to save, and compare two states bitwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from train.config import MeshConfig
from train.core.optimizer.update import OptimizerState
from train.core.state import TrainState
from train.resolve.mesh import make_mesh


def make_state(step: int, size: int = 64, seed: int | None = None) -> TrainState:
    """Draw a state from a seed, by default from the step."""
    rng = np.random.default_rng(step if seed is None else seed)
    sharding = NamedSharding(
        make_mesh(MeshConfig(), jax.devices()[:1]), PartitionSpec()
    )

    def draw(dtype: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.normal(size=(size, 8)), dtype), sharding)

    params = {"w": draw(jnp.float32), "b": {"half": draw(jnp.bfloat16)}}
    moments = {"w": draw(jnp.float32), "b": {"half": draw(jnp.bfloat16)}}
    state = OptimizerState((moments,), None)
    return TrainState(jax.device_put(jnp.int32(step), sharding), params, state)


def like(size: int = 64) -> TrainState:
    """Return the abstract state that `restore` takes: shapes, dtypes and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        make_state(0, size),
    )


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
