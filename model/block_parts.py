"""The modules that a block is made of. The caller of `GPT` chooses them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from model.choices import Mixer
from model.config import ModelConfig

Make = Callable[[ModelConfig, nnx.Rngs], Any]


class BlockParts(NamedTuple):
    """Functions that make the mixer and the MLP of a block.

    mixers: a function for each mixer.
    mlp: makes the MLP of a block without experts.
    experts: makes the MLP of a block with experts.
    """

    mixers: Mapping[Mixer, Make]
    mlp: Make
    experts: Make
