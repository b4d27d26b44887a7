"""Factors on parameters: on initial values, learning rates and Adam's epsilon."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from model.config import ModelConfig


class Factors(NamedTuple):
    """Factors on a parameter's initial values, its learning rate and Adam's epsilon."""

    initial: float = 1.0
    learning_rate: float = 1.0
    epsilon: float = 1.0


def scale_initial_values(
    params: Any, factors: Mapping[str, Factors], model: ModelConfig
) -> Any:
    """Return initial parameters, multiplied by their factors."""

    def scale(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        factor = factors.get(name, Factors()).initial
        if factor == 1:
            return x
        # A norm with an offset of 1 stores its scale minus 1.
        offset = float(model.norm_unit_offset and name.endswith("norm.scale"))
        return (x + offset) * factor - offset

    return jax.tree_util.tree_map_with_path(scale, params)
