"""The record of latent attention as a mixer."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model.attention.kind import ATTENTION, head_dims
from model.config import ModelConfig
from model.mixer_kind import SharedDim

if TYPE_CHECKING:
    from flax import nnx


def _make(config: ModelConfig, rngs: "nnx.Rngs") -> Any:
    from model.parts.latent.attention import LatentAttention

    return LatentAttention(config, rngs)


def _dims(model: ModelConfig) -> list[SharedDim]:
    dims = [*head_dims(model), SharedDim("embed", "kv_rank", model.kv_rank)]
    if model.query_rank is not None:
        dims.append(SharedDim("embed", "query_rank", model.query_rank))
    return dims


LATENT_ATTENTION = replace(ATTENTION, make=_make, dims=_dims)
