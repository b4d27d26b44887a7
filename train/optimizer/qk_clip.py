"""QK-clip: shrink the queries and keys of a head whose scores grow too large.

After an update, each head whose largest score s in the global batch exceeds a threshold
S gets weights that multiply its scores by gamma = S / s. Other heads do not change.

- Attention multiplies keys by sqrt(gamma) of their most reduced query head, and queries
  by the rest of gamma. With one query head for each key head, both get sqrt(gamma).
- Latent attention multiplies the parts without rotation by sqrt(gamma), and the rotated
  part of a head's queries by gamma. All heads share the rotated part of the keys, which
  does not change.

Kernels do not return the largest score. s is the largest log-sum-exp of a query's
scores (`Attended` in model/attention/inputs.py), which every kernel computes. It is
never below the largest score, and at most the logarithm of the number of keys above it.

Source: Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1.

Shapes: L layers, N query heads, K key heads, H dims of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model.choices import Mixer
from model.config import ModelConfig
from model.params import LAYERS
from model.pattern import segments_of


def clip_scores(
    params: Any, bounds_LN: Float[Array, "L N"], threshold: float, config: ModelConfig
) -> Any:
    """Return float32 weights whose scores are below the threshold on the same batch.

    `bounds_LN` are the bounds of the scores of all layers, on the global batch.
    """
    gamma_LN = threshold / jnp.maximum(bounds_LN, threshold)
    params = jax.tree.map(lambda x: x, params)  # copies the dicts only
    for number, segment in enumerate(segments_of(config)):
        for slot, kind in enumerate(segment.pattern):
            attention = params[LAYERS][str(number)][str(slot)]["attention"]
            slot_gamma_LN = gamma_LN[np.array(segment.layers(slot))]
            if kind.mixer is Mixer.attention:
                _scale_attention(attention, slot_gamma_LN, config)
            elif kind.mixer is Mixer.latent_attention:
                _scale_latent_attention(attention, slot_gamma_LN, config.nope_head_dim)
    return params


def _scale_attention(
    attention: dict[str, Any], gamma_LN: Float[Array, "L N"], config: ModelConfig
) -> None:
    L, N = gamma_LN.shape
    queries_per_key = N // config.kv_heads
    gamma_LK = jnp.min(gamma_LN.reshape(L, -1, queries_per_key), axis=2)
    root_LK = jnp.sqrt(gamma_LK)
    query_LN = gamma_LN / jnp.repeat(root_LK, queries_per_key, axis=1)
    _scale_heads(attention["key"], root_LK[..., None])
    # The projection of queries may also have gates, after the queries of each head.
    H = config.head_size
    _scale_heads(attention["query"], _over_dims(query_LN, H, H * config.attention_gate))


def _scale_latent_attention(
    attention: dict[str, Any], gamma_LN: Float[Array, "L N"], nope_dim: int
) -> None:
    expansion = "query_up" if "query_up" in attention else "query"
    rope_dim = attention[expansion]["weight"].shape[-1] - nope_dim
    value_dim = attention["key_value_up"]["weight"].shape[-1] - nope_dim
    root_LN = jnp.sqrt(gamma_LN)
    query_LNH = _over_dims(root_LN, nope_dim, rope_dim, gamma_LN)
    _scale_heads(attention[expansion], query_LNH)
    _scale_heads(attention["key_value_up"], _over_dims(root_LN, nope_dim, value_dim))


def _over_dims(
    factor_LN: Float[Array, "L N"],
    dims: int,
    other_dims: int,
    other_LN: Float[Array, "L N"] | float = 1.0,
) -> Float[Array, "L N H"]:
    """Return `factor_LN` for the first dims of each head, and `other_LN` for others."""
    other_LN = jnp.broadcast_to(other_LN, factor_LN.shape)
    pairs = (factor_LN, dims), (other_LN, other_dims)
    parts = [jnp.repeat(factor[..., None], size, axis=2) for factor, size in pairs]
    return jnp.concatenate(parts, axis=2)


def _scale_heads(
    projection: dict[str, jax.Array], factor_LNH: Float[Array, "L N _"]
) -> None:
    """Multiply a projection's weight [L, inputs, N, H], and its bias [L, N, H]."""
    for name, array in projection.items():
        factor = factor_LNH if array.ndim == 3 else factor_LNH[:, None]
        projection[name] = array * factor
