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

from model.attention.kind import ATTENTION
from model.config import LATENT_ATTENTION, ModelConfig
from model.params import LAYERS
from model.pattern import segments_of


def clip_scores(
    config: ModelConfig, threshold: float, bounds_LN: Float[Array, "L N"], params: Any
) -> Any:
    """Return float32 weights whose scores are smaller in heads above the threshold.

    `bounds_LN` are the largest log-sum-exps of the scores of each head.
    """
    gamma_LN = threshold / jnp.maximum(bounds_LN, threshold)
    params = jax.tree.map(lambda x: x, params)  # copies the dicts only
    for number, segment in enumerate(segments_of(config)):
        for slot, kind in enumerate(segment.pattern):
            attention = params[LAYERS][str(number)][str(slot)]["attention"]
            slot_gamma_LN = gamma_LN[np.array(segment.layers(slot))]
            if kind.mixer == ATTENTION.name:
                _scale_attention(attention, slot_gamma_LN, config)
            elif kind.mixer == LATENT_ATTENTION:
                _scale_latent_attention(attention, slot_gamma_LN, config)
    return params


def _scale_attention(
    attention: dict[str, Any], gamma_LN: Array, config: ModelConfig
) -> None:
    L, N = gamma_LN.shape
    H = config.head_size
    queries_per_key = N // config.kv_heads
    root_LK = jnp.sqrt(jnp.min(gamma_LN.reshape(L, -1, queries_per_key), axis=2))
    query_LN = gamma_LN / jnp.repeat(root_LK, queries_per_key, axis=1)
    # After the queries of a head, their projection may also have the head's gates.
    num_gates = H * config.attention_gate
    _scale_heads(attention["query"], (query_LN, H), (jnp.ones((L, N)), num_gates))
    _scale_heads(attention["key"], (root_LK, H))


def _scale_latent_attention(
    attention: dict[str, Any], gamma_LN: Array, config: ModelConfig
) -> None:
    root_LN = jnp.sqrt(gamma_LN)
    ones_LN = jnp.ones(gamma_LN.shape)
    nope_dim = config.nope_head_dim
    rope_dim = config.rope_head_dim
    query = attention["query_up" if config.query_rank else "query"]
    _scale_heads(query, (root_LN, nope_dim), (gamma_LN, rope_dim))
    key_value = attention["key_value_up"]
    _scale_heads(key_value, (root_LN, nope_dim), (ones_LN, config.value_size))


def _scale_heads(
    projection: dict[str, jax.Array], *factors: tuple[Float[Array, "L N"], int]
) -> None:
    """Multiply a projection's weight [L, inputs, N, H], and its bias [L, N, H].

    `factors` has the factors of heads, and the number of dims that they multiply.
    """
    parts = [jnp.repeat(x_LN[..., None], size, axis=2) for x_LN, size in factors]
    factor_LNH = jnp.concatenate(parts, axis=2)
    for name, array in projection.items():
        is_bias = array.ndim == 3
        projection[name] = array * (factor_LNH if is_bias else factor_LNH[:, None])
