"""The record of an MLP: what other modules must know of it, without JAX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.mixer_kind import SharedDim

if TYPE_CHECKING:
    from flax import nnx


def mlp_dims(model: ModelConfig) -> list[SharedDim]:
    """Return the hidden dim of the built-in MLP."""
    return [SharedDim("mlp", "mlp_dim", model.mlp_size)]


@dataclass(frozen=True)
class MLPKind:
    """An MLP for blocks without experts, as the rest of the program sees it.

    name: the value of `model.mlp`.
    make: returns the module, which has the call signature of `MLP` (model/layers.py).
    dims: lists the dims that mesh axes must divide.
    section: the frozen dataclass of the MLP's own keys, which are
        `model.parts.<name>.<key>`; `ModelConfig.part` returns its values.
    small_sizes: sizes for `train.prove`, which shrinks models, by key below `model.`.
    width_keys: keys below `model.` of sizes that grow with the width of the model.
    """

    name: str
    make: "Callable[[ModelConfig, nnx.Rngs], Any]"
    dims: Callable[[ModelConfig], list[SharedDim]] = mlp_dims
    section: type | None = None
    small_sizes: Mapping[str, int] = field(default_factory=dict)
    width_keys: tuple[str, ...] = ()


def mlps_of(config: ModelConfig) -> Mapping[str, MLPKind]:
    """Return the added MLPs that `model.mlp` may name, by name."""
    return getattr(type(config), "own", {}).get("mlp", {})
