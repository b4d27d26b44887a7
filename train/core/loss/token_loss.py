"""The loss of a token, which a step takes as a value (train/losses/catalog.py).

It depends on the logits only through log Z, the logarithm of the softmax's sum, and
through the target's logit. So its gradient is a multiple of the softmax minus a
multiple of the target's one-hot vector, in tiles and in pieces of the vocabulary.
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
    """

    log_z: Float[Array, "*tokens"]
    target_logit: Float[Array, "*tokens"]
    has_target: Bool[Array, "*tokens"]

    def sum(self, values: Float[Array, "*tokens"]) -> Float[Array, ""]:
        """Sum values of the tokens that have a target."""
        return jnp.sum(jnp.where(self.has_target, values, 0.0))


class LogitFactors(NamedTuple):
    """The factors of the two parts of the gradient by the logits of tokens.

    Factors of tokens without a target are ignored.

    softmax: the derivative of the loss by log Z, which multiplies the probabilities.
    target: minus the derivative by the target's logit. None means 1.
    """

    softmax: Float[Array, "*tokens"]
    target: Float[Array, "*tokens"] | None = None

    def gradient(self, probabilities: jax.Array, is_target: jax.Array) -> jax.Array:
        """Return the gradient by logits [*tokens, ids] of tokens with a target."""
        subtracted = is_target
        if self.target is not None:
            subtracted = jnp.where(is_target, self.target[..., None], 0.0)
        return self.softmax[..., None] * probabilities - subtracted


@runtime_checkable
class TokenLoss(Protocol):
    """What a step minimizes. An instance is hashed by its values and its class."""

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

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, whose cross-entropies sum to `nats`."""
        return nats + self.z_loss * tokens.sum(jnp.square(tokens.log_z))

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the factors of the gradient of each token's loss."""
        return LogitFactors(1 + 2 * self.z_loss * tokens.log_z)
