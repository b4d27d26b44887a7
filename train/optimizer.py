"""AdamW and Muon, their schedules, and the average of weights.

optax computes a direction; this module scales it by the schedule at the *step*, which a
skipped update does not hold back, and applies it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.params import Kind, ParamInfo
from train.config import Optimizer as Choice
from train.config import OptimizerConfig, Schedule, ScheduleConfig


class OptimizerState(NamedTuple):
    """optax's own state, and the average of weights (None unless asked for)."""

    transform: Any
    average: Any


@dataclass(frozen=True)
class Optimizer:
    """A direction, the factor on it, and how to take a step."""

    config: OptimizerConfig
    transform: optax.GradientTransformation
    factor: Callable[[jax.Array], jax.Array]  # of the step

    def init(self, params: Any) -> OptimizerState:
        """Start: moments at zero, the average at the weights."""
        average = None
        if self.config.ema_decay is not None:
            # A copy: parameters and average are both donated to the step.
            average = jax.tree.map(jnp.copy, params)
        return OptimizerState(self.transform.init(params), average)

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Give AdamW's rate for the update after `step` updates."""
        return self.config.learning_rate * self.factor(step)

    def update(
        self, grads: Any, norm: jax.Array, state: OptimizerState, params: Any, step: Any
    ) -> tuple[Any, OptimizerState]:
        """Take a step against the gradient, whose global norm is given."""
        if self.config.clip_norm is not None:
            scale = jnp.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        directions, transform = self.transform.update(grads, state.transform, params)
        factor = self.factor(step)
        params = jax.tree.map(
            lambda p, d: (p - factor * d).astype(p.dtype), params, directions
        )
        average, decay = state.average, self.config.ema_decay
        if decay is not None:
            average = jax.tree.map(
                lambda a, p: decay * a + (1 - decay) * p, average, params
            )
        return params, OptimizerState(transform, average)


def make_optimizer(
    config: OptimizerConfig, schedule: ScheduleConfig, num_steps: int, infos: Any
) -> Optimizer:
    """Build the optimizer for parameters described by a tree of `ParamInfo`."""
    decayed = jax.tree.map(
        lambda info: info.kind is not Kind.vector, infos, is_leaf=_info
    )
    adamw = optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale(config.learning_rate),
    )
    if config.name is Choice.muon:
        labels = jax.tree.map(
            lambda info: "muon" if info.kind is Kind.matrix else "adamw",
            infos,
            is_leaf=_info,
        )
        adamw = optax.partition({"muon": _muon(config, infos), "adamw": adamw}, labels)
    return Optimizer(config, adamw, factor(schedule, num_steps))


def _info(leaf: Any) -> bool:
    return isinstance(leaf, ParamInfo)


def _muon(config: OptimizerConfig, infos: Any) -> optax.GradientTransformation:
    """Momentum, orthogonalized by five Newton-Schulz steps, scaled by shape.

    Dims besides a matrix' inputs and outputs (the layers) are one batched product: the
    update of a stack equals the updates of its layers.

    Source: https://kellerjordan.github.io/posts/muon/.
    """

    def dims(info: ParamInfo) -> Any:
        if info.kind is not Kind.matrix:
            return optax.MaskedNode()
        first = int(info.stacked)
        inputs = tuple(range(first, first + info.inputs))
        outputs = tuple(range(first + info.inputs, len(info.axes)))
        return optax.contrib.MuonDimensionNumbers(inputs, outputs)

    dim_numbers = jax.tree.map(dims, infos, is_leaf=_info)

    def scale_by_shape(updates: Any, params: Any = None) -> Any:
        def scaled(update: jax.Array, dims: optax.contrib.MuonDimensionNumbers):
            fan_in = math.prod(update.shape[i] for i in dims.reduction_axis)
            fan_out = math.prod(update.shape[i] for i in dims.output_axis)
            return update * max(1.0, fan_out / fan_in) ** 0.5

        return jax.tree.map(scaled, updates, dim_numbers)

    return optax.chain(
        optax.contrib.scale_by_muon(
            beta=config.muon_momentum, weight_dimension_numbers=lambda _: dim_numbers
        ),
        optax.stateless(scale_by_shape),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale(config.muon_learning_rate),
    )


def factor(config: ScheduleConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Give the schedule as a function of the step, 1 at its peak.

    Linear warm-up, then: `constant`; `cosine` down to the final fraction at num_steps;
    `wsd` level, then linear down over the last `decay_steps` (null: 30 %).
    """
    warmup, final = config.warmup_steps, config.final_fraction
    level = optax.constant_schedule(1.0)
    if config.name is Schedule.cosine:
        body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
    elif config.name is Schedule.wsd:
        decay = config.decay_steps or max(1, round(0.3 * num_steps))
        down = optax.linear_schedule(1.0, final, decay)
        body = optax.join_schedules([level, down], [max(0, num_steps - decay - warmup)])
    else:
        body = level
    # The first update, at step 0, already moves: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )
