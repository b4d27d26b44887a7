"""The loss of a token from its value alone: derivatives are automatic."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train.core.loss.token_loss import LogitFactors, Tokens


@dataclass(frozen=True)
class DerivedLoss:
    """A loss of a token with derivatives by automatic differentiation.

    value: maps log Z and the target's logit, float32 arrays of one shape, to the loss
        of each token. Traces are cached by it, so it must hash by value: pass a
        function of a module, or an instance of a frozen dataclass with `__call__`.
        Whatever it returns for tokens without a target is ignored.
    uses_mean_logit: whether `value` also takes the mean logit, as a third array.
    """

    value: Callable[..., jax.Array]
    uses_mean_logit: bool = False

    def sum(self, tokens: Tokens, nats: Float[Array, ""]) -> Float[Array, ""]:
        """Return the loss of all tokens, whose cross-entropies sum to `nats`."""
        return tokens.sum(self.value(*self._arguments(tokens)))

    def factors(self, tokens: Tokens) -> LogitFactors:
        """Return the factors of the gradient of each token's loss."""

        def total(*arguments: jax.Array) -> jax.Array:
            return jnp.sum(self.value(*arguments))

        arguments = self._arguments(tokens)
        gradients = jax.grad(total, argnums=tuple(range(len(arguments))))(*arguments)
        by_log_z, by_target, *by_mean = gradients
        return LogitFactors(by_log_z, -by_target, *by_mean)

    def _arguments(self, tokens: Tokens) -> tuple[jax.Array, ...]:
        if tokens.mean_logit is None:
            return tokens.log_z, tokens.target_logit
        return tokens.log_z, tokens.target_logit, tokens.mean_logit
