"""The record of the gated delta net as a mixer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data.errors import Mistake
from model.config import ModelConfig
from model.mixer_kind import LeastPiece, MixerKind, SharedDim

if TYPE_CHECKING:
    from flax import nnx


def _make(config: ModelConfig, rngs: "nnx.Rngs") -> Any:
    from model.parts.delta.layer import GatedDeltaNet

    return GatedDeltaNet(config, rngs)


def _dims(model: ModelConfig) -> list[SharedDim]:
    return [SharedDim("heads", "delta_key_heads", model.delta_sizes.key_heads)]


def _flops(model: ModelConfig, window: int | None, length: int) -> int:
    """Return 18 S for states of S numbers, whatever the length of a row.

    A token reads the states for a key and for a query, and writes them.
    """
    sizes = model.delta_sizes
    return 18 * sizes.value_heads * sizes.key_dim * sizes.value_dim


def _least_piece(model: ModelConfig) -> LeastPiece:
    return LeastPiece(
        positions=model.delta_conv_width - 1,
        reason="a gated delta net needs model.delta_conv_width - 1",
        key="delta_conv_width",
    )


def _rules(model: ModelConfig) -> Iterator[Mistake]:
    key_heads, value_heads, *_ = model.delta_sizes
    if value_heads % key_heads:
        rule = (
            f"must be a multiple of the {key_heads} key heads (model.delta_key_heads, "
            "by default model.num_heads); each key head serves the same number of "
            "value heads"
        )
        related = ("model.delta_key_heads", "model.num_heads")
        key = "model.delta_value_heads"
        yield Mistake(key, model.delta_value_heads, rule, related)


GATED_DELTA = MixerKind(
    name="gated_delta",
    make=_make,
    dims=_dims,
    flops=_flops,
    rules=_rules,
    flops_formula="18 L S",
    keys=("delta_",),
    small_sizes={
        "delta_key_heads": 2,
        "delta_value_heads": 4,
        "delta_key_dim": 8,
        "delta_value_dim": 6,
    },
    width_keys=("delta_key_heads", "delta_value_heads"),
    attends=False,
    least_piece=_least_piece,
)
