"""The record of the gated delta net as a mixer."""

from typing import TYPE_CHECKING, Any

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


GATED_DELTA = MixerKind(
    make=_make,
    dims=_dims,
    flops=_flops,
    flops_formula="18 L S",
    keys=("delta_",),
    attends=False,
    least_piece=_least_piece,
)
