"""The loss of a token, which a step takes as a value (train/losses/catalog.py).

It depends on the logits only through log Z, the logarithm of the softmax's sum, through
the target's logit, and through the mean logit. So its gradient is a multiple of the
softmax, minus a multiple of the target's one-hot vector, plus a constant, in tiles and
in pieces of the vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Tokens(NamedTuple):
    """What the loss of tokens depends on. All arrays have one shape.

    log_z: the logarithm of the softmax's sum, in float32.
    target_logit: the target's logit, in float32; zero without a target.
    mean_logit: the mean logit of all ids that the tokenizer has, in float32. None if
        the loss does not use it.
    """

    log_z: Float[Array, "*tokens"]
    target_logit: Float[Array, "*tokens"]
    has_target: Bool[Array, "*tokens"]
    mean_logit: Float[Array, "*tokens"] | None = None

    def sum(self, values: Float[Array, "*tokens"]) -> Float[Array, ""]:
        """Sum values of the tokens that have a target."""
        return jnp.sum(jnp.where(self.has_target, values, 0.0))


class LogitFactors(NamedTuple):
    """The factors of the parts of the gradient by the logits of tokens.

    Factors of tokens without a target are ignored.

    softmax: the derivative of the loss by log Z, which multiplies the probabilities.
    target: minus the derivative by the target's logit. None means 1.
    mean_logit: the derivative by the mean logit. None means 0.
    """

    softmax: Float[Array, "*tokens"]
    target: Float[Array, "*tokens"] | None = None
    mean_logit: Float[Array, "*tokens"] | None = None

    def gradient(
        self,
        probabilities: jax.Array,
        is_target: jax.Array,
        shares: jax.Array | None = None,
    ) -> jax.Array:
        """Return the gradient by logits [*tokens, ids] of tokens with a target.

        `shares` are the derivatives of the mean logit by each logit, if it is used.
        """
        subtracted = is_target
        if self.target is not None:
            subtracted = jnp.where(is_target, self.target[..., None], 0.0)
        gradient = self.softmax[..., None] * probabilities - subtracted
        if self.mean_logit is not None and shares is not None:
            gradient += self.mean_logit[..., None] * shares
        return gradient


@runtime_checkable
class TokenLoss(Protocol):
    """What a step minimizes. An instance is hashed by its values and its class."""

    @property
    def uses_mean_logit(self) -> bool:
        """Whether the loss depends on the mean logit, which takes another reduction."""
        ...

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, whose cross-entropies sum to `nats`."""
        ...

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the factors of the gradient of each token's loss."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy, plus log²Z times a weight.

    z_loss: the weight, which keeps logits from drifting (PaLM, section 5).
    """

    z_loss: float = 0.0
    uses_mean_logit = False

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, whose cross-entropies sum to `nats`."""
        return nats + self.z_loss * tokens.sum(jnp.square(tokens.log_z))

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the factors of the gradient of each token's loss."""
        return LogitFactors(1 + 2 * self.z_loss * tokens.log_z)
