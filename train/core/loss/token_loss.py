"""The loss of a token as a value, which train/losses/catalog.py chooses."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Tokens(NamedTuple):
    """What the loss of each token depends on.

    log_z: the logarithm of the softmax's sum, which depends on all logits.
    """

    log_z: Float[Array, "*tokens"]
    target_logit: Float[Array, "*tokens"]
    has_target: Bool[Array, "*tokens"]

    def sum(self, values: Float[Array, "*tokens"]) -> Float[Array, ""]:
        """Sum values of the tokens that have a target."""
        return jnp.sum(jnp.where(self.has_target, values, 0.0))


class LogitFactors(NamedTuple):
    """The factors of the two parts of the gradient of a token's logits.

    softmax: the derivative of the loss by log Z, which multiplies the probabilities.
    target: minus the derivative by the target's logit. None means 1.
    """

    softmax: Float[Array, "*tokens"]
    target: Float[Array, "*tokens"] | None = None

    def gradient(self, probabilities: jax.Array, is_target: jax.Array) -> jax.Array:
        """Return the gradient of logits [*tokens, ids]."""
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
        """Return what the loss multiplies the parts of its gradient by."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy plus z_loss log²Z, which keeps logits from drifting (PaLM)."""

    z_loss: float = 0.0

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, as `TokenLoss` describes."""
        return nats + self.z_loss * tokens.sum(jnp.square(tokens.log_z))

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the factors of the softmax, and 1 for the target."""
        return LogitFactors(1 + 2 * self.z_loss * tokens.log_z)
