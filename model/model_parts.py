"""The parts that a model is made of. The caller of `GPT` chooses them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.mixer_kind import MixerKind

Make = Callable[[ModelConfig, nnx.Rngs], Any]
# Takes x_BTD and the channels before it, or None; returns both, as
# model/parts/token_shift.py describes.
Shift = Callable[
    [jax.Array, jax.Array | None, Execution, CallContext],
    tuple[jax.Array, jax.Array | None],
]


class ModelParts(NamedTuple):
    """Functions that make the parts of a model.

    mixers: the record of each mixer, by its name.
    mlp: makes the MLP of a block without experts.
    experts: makes the MLP of a block with experts.
    shift: shifts channels of the inputs of a block's mixer and MLP by one position.
    prediction_modules: makes the modules of multi-token prediction, which GPT runs
        by their `run` (model/parts/predict_ahead.py).
    """

    mixers: Mapping[str, MixerKind]
    mlp: Make
    experts: Make
    shift: Shift
    prediction_modules: Callable[[ModelConfig, nnx.Rngs, "ModelParts"], Any]
