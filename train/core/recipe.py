"""What a training step computes, besides its model and its optimizer."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Recipe(NamedTuple):
    """The settings of a step. train/config/training.py explains each.

    skip_window: the number of accepted steps that a spike is compared with.
    skip_sigma: the standard deviations above their mean that make a spike. None
        accepts every finite step.
    """

    accumulation_steps: int = 1
    z_loss: float = 0.0
    loss_chunk_tokens: int | None = None
    skip_sigma: float | None = None
    skip_window: int = 128
    predict_ahead_weight: float = 0.0
    predict_ahead_later_weight: float | None = None
    predict_ahead_later_step: int = 0

    def ahead_weight(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Return the weight of the loss of prediction modules in a step."""
        weight = jnp.float32(self.predict_ahead_weight)
        if self.predict_ahead_later_weight is None:
            return weight
        later_weight = jnp.float32(self.predict_ahead_later_weight)
        return jnp.where(step >= self.predict_ahead_later_step, later_weight, weight)
