"""The record of latent attention as a mixer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data.errors import Mistake
from model.attention.kind import ATTENTION, head_dims
from model.choices import Position
from model.config import LATENT_ATTENTION as NAME
from model.config import ModelConfig
from model.mixer_kind import SharedDim

if TYPE_CHECKING:
    from flax import nnx


# The values of keys that latent attention does not read.
_NEEDED: dict[str, Any] = {
    **{"num_kv_heads": None, "head_dim": None, "qk_norm": False, "qkv_bias": False},
    **{"window": None, "query_scale_dim": None, "attention_sinks": False},
    **{"attention_soft_cap": None, "attention_gate": False},
    **{"position": Position.rotary, "rotary_fraction": 1.0, "bias": False},
}


def _make(config: ModelConfig, rngs: "nnx.Rngs") -> Any:
    from model.parts.latent.attention import LatentAttention

    return LatentAttention(config, rngs)


def _dims(model: ModelConfig) -> list[SharedDim]:
    dims = [*head_dims(model), SharedDim("embed", "kv_rank", model.kv_rank)]
    if model.query_rank is not None:
        dims.append(SharedDim("embed", "query_rank", model.query_rank))
    return dims


def _rules(model: ModelConfig) -> Iterator[Mistake]:
    if not model.has_latent_attention:
        return
    related = ("model.mixer", "model.mixer_pattern")
    for name, needed in _NEEDED.items():
        if (value := getattr(model, name)) != needed:
            text = "null" if needed is None else str(needed).lower()
            rule = f"must be {text} with latent_attention layers"
            yield Mistake(f"model.{name}", value, rule, related)
    if model.rope_head_dim % 2:
        rule = "must be even, because pairs of dims are rotated"
        yield Mistake("model.rope_head_dim", model.rope_head_dim, rule, related)


LATENT_ATTENTION = replace(
    ATTENTION,
    name=NAME,
    make=_make,
    dims=_dims,
    rules=_rules,
    small_sizes={
        "query_rank": 16,
        "kv_rank": 16,
        "nope_head_dim": 8,
        "rope_head_dim": 4,
        "value_head_dim": 6,
    },
    width_keys=("query_rank", "kv_rank"),
)
