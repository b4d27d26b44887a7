"""What training carries from step to step, and what a checkpoint holds.

No random key and no data position: both are functions of the seed and the step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.gpt import GPT, params_of
from train.config import TrainConfig
from train.optimizer.update import Optimizer, OptimizerState
from train.spikes import Recent, no_steps


class TrainState(NamedTuple):
    """The whole of it.

    step: int32 scalar, the number of completed updates.
    params: nested dicts of arrays, the layers' stacked along a leading dim.
    optimizer: moments and, if asked for, averaged weights.
    recent: what spikes are measured against; None without `train.skip_sigma`.
    """

    step: jax.Array
    params: dict[str, Any]
    optimizer: OptimizerState
    recent: Recent | None = None


def initial_state(
    model: ModelConfig, optimizer: Optimizer, train: TrainConfig, seed: int
) -> TrainState:
    """Draw the state of step 0; the same on any mesh. Meant for `jit`."""
    params = params_of(GPT(model, nnx.Rngs(seed)))
    recent = None if train.skip_sigma is None else no_steps(train.skip_window)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), recent)


def abstract_state(
    model: ModelConfig, optimizer: Optimizer, train: TrainConfig
) -> TrainState:
    """Return the shapes and dtypes of the state; no memory is allocated."""
    return jax.eval_shape(lambda: initial_state(model, optimizer, train, 0))


def as_saved(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds by name: a field that is None leaves no trace."""
    return {k: v for k, v in state._asdict().items() if v is not None}


def best_params(state: TrainState) -> Any:
    """Return the average of weights where one is kept, else the weights."""
    average = state.optimizer.average
    return state.params if average is None else average
