"""Losses whose derivatives are computed from their values."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train.core.loss.token_loss import LogitFactors, Tokens

# Maps log Z and the target's logit, float32 arrays of one shape, to the loss of tokens.
Value = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class DerivedLoss:
    """A loss that is a function of each token's log Z and of its target's logit.

    value: the function. It must hash by value, because traces are cached by it: use a
        function of a module, or an instance of a frozen dataclass with `__call__`. Of
        tokens without a target, neither the value nor the derivatives count.
    """

    value: Value

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, as `TokenLoss` describes."""
        return tokens.sum(self.value(tokens.log_z, tokens.target_logit))

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the derivatives. Those of a sum are those of each token."""

        def total(log_z: jax.Array, target_logit: jax.Array) -> jax.Array:
            return jnp.sum(self.value(log_z, target_logit))

        differentiate = jax.grad(total, argnums=(0, 1))
        by_log_z, by_target = differentiate(tokens.log_z, tokens.target_logit)
        return LogitFactors(by_log_z, -by_target)
