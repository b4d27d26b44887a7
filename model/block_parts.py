"""The modules that a block is made of. The caller of `GPT` chooses them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from model.choices import Mixer
from model.config import ModelConfig
from model.execution import CallContext, Execution

Make = Callable[[ModelConfig, nnx.Rngs], Any]
# Takes x_BTD and the channels before it, or None; returns both, as
# model/parts/token_shift.py describes.
Shift = Callable[
    [jax.Array, jax.Array | None, Execution, CallContext],
    tuple[jax.Array, jax.Array | None],
]


class BlockParts(NamedTuple):
    """Functions that make the mixer and the MLP of a block.

    mixers: a function for each mixer.
    mlp: makes the MLP of a block without experts.
    experts: makes the MLP of a block with experts.
    shift: shifts channels of the inputs of a block's mixer and MLP by one position.
    """

    mixers: Mapping[Mixer, Make]
    mlp: Make
    experts: Make
    shift: Shift
