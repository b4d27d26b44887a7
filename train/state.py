"""What training carries from step to step, and what a checkpoint holds.

No random key and no data position: both are functions of the seed and the step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.gpt import GPT, params_of
from train.optimizer import Optimizer, OptimizerState


class TrainState(NamedTuple):
    """The whole of it.

    step: int32 scalar, the number of completed updates.
    params: nested dicts of arrays, the layers' stacked along a leading dim.
    optimizer: moments and, if asked for, averaged weights.
    """

    step: jax.Array
    params: dict[str, Any]
    optimizer: OptimizerState


def initial_state(model: ModelConfig, optimizer: Optimizer, seed: int) -> TrainState:
    """Draw the state of step 0; the same on any mesh. Meant for `jit`."""
    params = params_of(GPT(model, nnx.Rngs(seed)))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def abstract_state(model: ModelConfig, optimizer: Optimizer) -> TrainState:
    """Give the shapes and dtypes of the state, without memory."""
    return jax.eval_shape(lambda: initial_state(model, optimizer, 0))


def best_params(state: TrainState) -> Any:
    """Take the average of weights where one is kept, else the weights."""
    average = state.optimizer.average
    return state.params if average is None else average
