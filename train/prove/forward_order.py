"""List parameters in the order in which the forward pass uses them."""

from collections.abc import Iterator

import jax
from flax import nnx

from model.block import Block
from model.catalog import parts_of
from model.config import ModelConfig
from model.gpt import GPT
from model.pattern import segments_of


def forward_order(config: ModelConfig) -> list[str]:
    """Return the names of a model's parameters: each module declares them in order."""
    names = list[str]()

    def build() -> None:
        parts = parts_of(config)
        model = GPT(config, nnx.Rngs(0), parts)
        rngs = nnx.Rngs(0)
        for number, segment in enumerate(segments_of(config)):
            for slot, kind in enumerate(segment.pattern):
                # `nnx.vmap` has sorted the parameters of stacked blocks by name.
                block = Block(config, kind, rngs, parts)
                model.layers[str(number)][str(slot)] = block
        names.extend(_declared_names(model))

    jax.eval_shape(build)
    return names


def _declared_names(module: nnx.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module's parameters in the order of its attributes."""
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            yield f"{prefix}{name}"
        elif isinstance(value, nnx.Module):
            yield from _declared_names(value, f"{prefix}{name}.")
