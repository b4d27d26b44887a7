"""One update of the weights, and the average of weights.

optax computes a direction. This module multiplies the direction by the schedule at the
*step*, and subtracts the product from the weights. The step advances even if an update
is skipped. The update is computed in float32. Weights and moments in bfloat16 or eight
bits are rounded stochastically, without a float32 copy. The average is always float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from train.core.choices import MomentDtype
from train.core.optimizer.factors import Factors
from train.core.optimizer.moments import MomentStorage, decode_moments
from train.core.optimizer.overflow import num_overflows

# (gradients, moments, parameters, first repeat) -> (parameters, moments, whether the
# update is accepted), for all parameters or a part of them.
UpdatePart = Callable[[Any, Any, Any, Any], tuple[Any, Any, jax.Array]]


class OptimizerState(NamedTuple):
    """The state of the optax transformation, and the average of weights or None."""

    transform: Any
    average: Any


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Updates parameters and the optimizer's state. It is hashed by its identity.

    transform: the optax transformation, which includes peak learning rates.
    schedule: the factor on learning rates at a step.
    storage: the format of moments between updates.
    learning_rate_peak: the learning rate at a factor of 1, which metrics report.
    clip_norm: the largest norm of all gradients. None does not clip them.
    ema_decay: the decay of the average of weights. None keeps no average.
    checks_overflow: whether an update is checked before it is written.
    checks_again: whether the check computes the update a second time.
    factors: those on initial values, by the dotted name of a parameter.
    update_layers: runs an update layer by layer (train/optimizers/by_layer.py). None
        updates all parameters together.
    clip_scores: maps the bounds of all scores [L, N] and float32 weights to weights
        (train/optimizers/qk_clip.py). None does not clip scores.
    """

    transform: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]
    storage: MomentStorage
    learning_rate_peak: float
    clip_norm: float | None
    ema_decay: float | None
    checks_overflow: bool
    checks_again: bool
    factors: Mapping[str, Factors]
    update_layers: (
        Callable[[UpdatePart, Any, Any, Any], tuple[Any, Any, jax.Array]] | None
    ) = None
    clip_scores: Callable[[Float[Array, "L N"], Any], Any] | None = None

    def init(self, params: Any) -> OptimizerState:
        """Return zero moments, and averages equal to the weights."""
        average = None if self.ema_decay is None else averages(params)
        state = self.transform.init(jax.tree.map(_as_float32, params))
        if self.storage.dtype is not MomentDtype.float32:
            # Without the barrier, XLA spends seconds on constant folding.
            state = jax.lax.optimization_barrier(state)
        return OptimizerState(self.storage.encode(state, jnp.int32(0)), average)

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return the learning rate for the update after `step` updates."""
        return self.learning_rate_peak * self.schedule(step)

    def update(
        self,
        grads: Any,
        norm: jax.Array,
        state: OptimizerState,
        params: Any,
        step: Any,
        accepted: jax.Array | bool = True,
        clip: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, OptimizerState, jax.Array]:
        """Return new parameters, the new state, and whether the update is accepted.

        An update that would write a NaN or an infinity is not accepted. Then parameters
        and state stay unchanged. If layers are updated one by one, each is checked by
        itself, and the other layers change even if one layer is rejected. If `accepted`
        is False, no update is accepted. `norm` is the norm of all gradients. `clip`
        maps the new float32 weights to those that are stored.
        """
        factor = self.schedule(step)

        def update_part(
            grads: Any, moments: Any, params: Any, repeat: Any
        ) -> tuple[Any, Any, jax.Array]:
            new_params, new_moments, overflows = self._apply_and_check(
                grads, moments, params, norm=norm, factor=factor, accepted=accepted
            )
            if clip is not None:
                new_params = clip(new_params)
            part_accepted = accepted & (overflows == 0)
            new_params = self.storage.round_weights(new_params, params, step, repeat)
            new_moments = self.storage.encode(new_moments, step, repeat)
            new_params = _select(part_accepted, new_params, params)
            new_moments = _select(part_accepted, new_moments, moments)
            return new_params, new_moments, part_accepted

        if self.update_layers is not None:
            params, moments, accepted = self.update_layers(
                update_part, grads, state.transform, params
            )
        else:
            params, moments, accepted = update_part(grads, state.transform, params, 0)
        average = state.average
        decay = self.ema_decay
        if decay is not None:
            new_average = jax.tree.map(
                lambda a, p: decay * a + (1 - decay) * _as_float32(p), average, params
            )
            average = _select(accepted, new_average, average)
        return params, OptimizerState(moments, average), accepted

    def _apply_and_check(
        self,
        grads: Any,
        moments: Any,
        params: Any,
        *,
        norm: jax.Array,
        factor: jax.Array,
        accepted: jax.Array | bool,
    ) -> tuple[Any, Any, jax.Array]:
        """Return float32 weights and moments after an update, and count overflows."""
        weights, new_moments = self._apply(grads, moments, params, norm, factor)
        if not self.checks_overflow:
            return weights, new_moments, jnp.float32(0)

        def count(grads: Any, moments: Any, params: Any) -> jax.Array:
            new = weights, new_moments
            if self.checks_again:
                new = self._apply(grads, moments, params, norm, factor)
            # Norms need finite squares of weights. Rounding adds up to 1 % to moments.
            overflows = num_overflows(new[0], _float32_tree(params), jnp.square)
            old_moments = decode_moments(moments)
            return overflows + num_overflows(new[1], old_moments, lambda x: 1.01 * x)

        # In a branch, the check does not change how XLA compiles the written values, so
        # their bits stay the same. The branch reads the state again and computes the
        # update again, unless its products are expensive.
        overflows = jax.lax.cond(
            accepted, count, lambda *_: jnp.float32(0), grads, moments, params
        )
        return weights, new_moments, overflows

    def _apply(
        self, grads: Any, moments: Any, params: Any, norm: jax.Array, factor: jax.Array
    ) -> tuple[Any, Any]:
        """Return float32 weights and moments after an update."""
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        grads = _float32_tree(grads)
        weights = _float32_tree(params)
        directions, moments = self.transform.update(
            grads, decode_moments(moments), weights
        )
        weights = jax.tree.map(lambda w, d: w - factor * d, weights, directions)
        return weights, moments


def _as_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _float32_tree(tree: Any) -> Any:
    return jax.tree.map(_as_float32, tree)


def _select(accepted: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)


def averages(params: Any) -> Any:
    """Return averages equal to the weights, in float32.

    Copies are needed, because parameters and averages are both donated to the step.
    """
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
