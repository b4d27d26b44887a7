"""The modules that a block is made of, which the caller of `GPT` chooses."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from model.choices import Mixer
from model.config import ModelConfig

Make = Callable[[ModelConfig, nnx.Rngs], Any]


class Kinds(NamedTuple):
    """How to make the mixer and the MLP of each kind of block.

    mlps: by whether the block has experts.
    """

    mixers: Mapping[Mixer, Make]
    mlps: Mapping[bool, Make]
