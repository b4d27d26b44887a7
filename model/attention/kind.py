"""The record of plain attention as a mixer."""

from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.mixer_kind import MixerKind, SharedDim

if TYPE_CHECKING:
    from flax import nnx

_KEYS = (
    *("num_kv_heads", "qk_norm", "qkv_bias", "rope_", "rotary_fraction", "window"),
    *("layer_pattern", "attention", "query_scale_dim", "dropout.attention"),
)


def _make(config: ModelConfig, rngs: "nnx.Rngs") -> Any:
    from model.layers import SelfAttention

    return SelfAttention(config, rngs)


def head_dims(model: ModelConfig) -> list[SharedDim]:
    """Return the numbers of heads of queries, and of keys and values."""
    return [
        SharedDim("heads", "num_heads", model.num_heads),
        SharedDim("kv_heads", "num_kv_heads", model.kv_heads),
    ]


def _flops(model: ModelConfig, window: int | None, length: int) -> int:
    """Return 12 C T: the FLOPs of a token's scores and of its mean of values."""
    per_key = 6 * model.num_heads * (model.head_size + model.value_size)
    return per_key * min(length, window or length)


ATTENTION = MixerKind(
    name="attention",
    make=_make,
    dims=head_dims,
    flops=_flops,
    flops_formula="12 L C T",
    keys=_KEYS,
    width_keys=("num_heads", "num_kv_heads"),
)
