"""AdamW, with an epsilon for each parameter.

Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import optax

from train.config import OptimizerConfig
from train.core.optimizer.parts import RuleInputs, UpdateRule
from train.core.optimizer.rates import ParamRates, parameter_name, with_rates


def make_adamw(
    config: OptimizerConfig, inputs: RuleInputs
) -> optax.GradientTransformation:
    """Return AdamW's transformation."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    return with_rates(with_epsilons(adam, inputs.rates), inputs.rates)


def max_adam_direction(
    config: OptimizerConfig, rates: Collection[ParamRates]
) -> float | None:
    """Return the largest entry of Adam's direction. None means that it has no bound.

    The mean of clipped gradients is at most clip_norm, so Adam's direction is at most
    clip_norm / ((1 - b1) epsilon). `rates` are those of all parameters.
    """
    if config.clip_norm is None:
        return None
    epsilon = config.epsilon * min(own.epsilon for own in rates)
    return max(1e6, config.clip_norm / ((1 - config.b1) * epsilon))


def with_epsilons(
    adam: optax.GradientTransformation, rates: Mapping[str, ParamRates]
) -> optax.GradientTransformation:
    """Return Adam with another epsilon for each parameter.

    If a gradient is divided by f, Adam's direction is the one with f times the epsilon.
    """

    def divide(path: tuple[Any, ...], grad: jax.Array) -> jax.Array:
        factor = rates[parameter_name(path)].epsilon
        return grad if factor == 1 else grad / factor

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates = jax.tree_util.tree_map_with_path(divide, updates)
        return adam.update(updates, state, params)

    return optax.GradientTransformation(adam.init, update)


ADAMW = UpdateRule(make_adamw, max_adam_direction, updates_by_layer=True)
