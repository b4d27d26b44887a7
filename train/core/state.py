"""The state that training carries from step to step, and that a checkpoint saves.

The state has no random key or data position: both are functions of seed and step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig
from model.gpt import GPT, params_of
from model.model_parts import ModelParts
from model.params import named
from train.core.optimizer.factors import scale_initial_values
from train.core.optimizer.update import Optimizer, OptimizerState
from train.core.recipe import Recipe
from train.core.spikes import Recent, empty_recent


class TrainState(NamedTuple):
    """Everything that a training step carries and a checkpoint saves.

    step: int32 scalar, the number of completed updates.
    params: nested dicts of arrays; layers are stacked along a leading dim.
    recent: the steps that a spike is compared with; None without `train.skip_sigma`.
    """

    step: jax.Array
    params: dict[str, Any]
    optimizer: OptimizerState
    recent: Recent | None = None


def initial_state(
    model: ModelConfig,
    parts: ModelParts,
    optimizer: Optimizer,
    recipe: Recipe,
    seed: int,
) -> TrainState:
    """Return the state of step 0, the same on any mesh. Call it under `jit`."""
    params = params_of(GPT(model, nnx.Rngs(seed), parts))
    params = scale_initial_values(params, optimizer.factors, model)
    recent = None if recipe.skip_sigma is None else empty_recent(recipe.skip_window)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), recent)


def abstract_state(
    model: ModelConfig, parts: ModelParts, optimizer: Optimizer, recipe: Recipe
) -> TrainState:
    """Return the shapes and dtypes of the state, without allocating memory."""
    return jax.eval_shape(lambda: initial_state(model, parts, optimizer, recipe, 0))


def as_saved(state: TrainState) -> dict[str, Any]:
    """Return the fields that a checkpoint saves, by name: those that are not None."""
    return {k: v for k, v in state._asdict().items() if v is not None}


def best_params(state: TrainState) -> Any:
    """Return the averaged weights if the optimizer averages them, or the weights."""
    average = state.optimizer.average
    return state.params if average is None else average


def make_finite_check(
    state: TrainState, mesh: Mesh
) -> Callable[[TrainState], list[str]]:
    """Return a function that lists a state's arrays with values that are not finite.

    The function returns the same list on all processes. `state` has
    `jax.ShapeDtypeStruct` leaves with their shardings.
    """
    device_names = list[str]()
    host_groups = list[list[str]]()
    for name, leaf in named(state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if leaf.sharding.memory_kind == "pinned_host":
            host_groups.append([name])  # Together they may exceed device memory.
        else:
            device_names.append(name)

    def all_finite(arrays: list[jax.Array]) -> jax.Array:
        space = jax.memory.Space.Device
        return jnp.stack([jnp.isfinite(jax.device_put(x, space)).all() for x in arrays])

    check = jax.jit(all_finite, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def list_not_finite(state: TrainState) -> list[str]:
        arrays = dict(named(state))
        names = []
        for group in (device_names, *host_groups):
            is_finite = np.asarray(check([arrays[name] for name in group]))
            names += [name for name, ok in zip(group, is_finite, strict=True) if not ok]
        return names

    return list_not_finite
