"""The tokens that prediction modules read and predict (model/parts/predict_ahead.py).

Shapes: B batch, T time, P modules.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Ahead(NamedTuple):
    """The int32 tokens that prediction modules read, and those that they predict.

    tokens_BTP: for module k, the token k positions ahead; -1 if the document or the row
        ends before it.
    targets_BTP: the target at the position of that token; -1 if there is none.
    """

    tokens_BTP: Int[Array, "B T P"]
    targets_BTP: Int[Array, "B T P"]


def look_ahead(
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"] | None,
    depth: int,
) -> Ahead:
    """Return the tokens that `depth` modules read and predict in whole rows."""

    def shift(x_BT: jax.Array, k: int) -> jax.Array:
        return jnp.pad(x_BT[:, k:], ((0, 0), (0, k)), constant_values=-1)

    tokens = []
    targets = []
    for k in range(1, depth + 1):
        tokens_BT = shift(inputs_BT, k)
        next_targets_BT = shift(targets_BT, k)
        if segment_ids_BT is not None:
            in_document = shift(segment_ids_BT, k) == segment_ids_BT
            tokens_BT = jnp.where(in_document, tokens_BT, -1)
            next_targets_BT = jnp.where(in_document, next_targets_BT, -1)
        tokens.append(tokens_BT)
        targets.append(next_targets_BT)
    return Ahead(jnp.stack(tokens, -1), jnp.stack(targets, -1))
