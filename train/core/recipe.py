"""What a training step computes, besides its model and its optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.core.loss.token_loss import TokenLoss

# Returns a scalar from the parameters before the update, and the gradients.
ComputeMetric = Callable[[Any, Any], jax.Array]


class Recipe(NamedTuple):
    """The settings of a step.

    accumulation_steps: the number of microbatches in a step.
    token_loss: the loss of a token, whose mean a step minimizes.
    loss_chunk_tokens: the largest number of positions of a row whose logits exist at
        once. None leaves the choice to the loss (train/core/loss/form.py).
    skip_sigma: the standard deviations above the mean of recent steps that make a
        spike, whose update is skipped. None accepts every finite step.
    skip_window: the number of accepted steps that a spike is compared with.
    predict_ahead_weight: the weight of the mean loss of prediction modules.
    predict_ahead_later_weight: this weight from the step predict_ahead_later_step on.
        None keeps predict_ahead_weight.
    metrics: names of further metrics, and the functions that compute them.
    """

    accumulation_steps: int
    token_loss: TokenLoss
    loss_chunk_tokens: int | None
    skip_sigma: float | None
    skip_window: int
    predict_ahead_weight: float
    predict_ahead_later_weight: float | None
    predict_ahead_later_step: int
    metrics: tuple[tuple[str, ComputeMetric], ...] = ()

    def ahead_weight(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Return the weight of the loss of prediction modules in a step."""
        weight = jnp.float32(self.predict_ahead_weight)
        if self.predict_ahead_later_weight is None:
            return weight
        later_weight = jnp.float32(self.predict_ahead_later_weight)
        return jnp.where(step >= self.predict_ahead_later_step, later_weight, weight)
