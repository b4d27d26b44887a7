"""The learning rate and the weight decay of each parameter."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from model.params import Kind, is_info, named
from train.config import OptimizerConfig, ParameterGroup
from train.core.optimizer.factors import Factors


class ParamRates(NamedTuple):
    """The peak learning rate of a parameter, and its decay relative to that rate.

    epsilon: a factor on Adam's epsilon.
    """

    learning_rate: float
    weight_decay: float
    epsilon: float = 1.0


def parameter_rates(
    config: OptimizerConfig,
    infos: Any,
    *,
    matrix_rates: ParamRates,
    groups: Mapping[str, ParameterGroup],
    factors: Mapping[str, Factors],
) -> dict[str, ParamRates]:
    """Return the rates of each parameter by its dotted name. Vectors do not decay.

    Args:
        config: the rates of parameters that are not matrices.
        infos: tree of `ParamInfo`.
        matrix_rates: the rates of matrices.
        groups: the group of each parameter that has one, by the parameter's name.
        factors: those on rates and epsilon, by the parameter's name.
    """
    rates = dict[str, ParamRates]()
    for name, info in named(infos, is_info):
        rate = config.learning_rate
        decay = config.weight_decay
        if info.kind is Kind.matrix:
            rate = matrix_rates.learning_rate
            decay = matrix_rates.weight_decay
        if info.kind is Kind.vector:
            decay = 0.0
        group = groups.get(name, ParameterGroup())
        if group.weight_decay is not None:
            decay = group.weight_decay
        own = factors.get(name, Factors())
        rate *= group.learning_rate * own.learning_rate
        rates[name] = ParamRates(rate, decay / own.learning_rate, own.epsilon)
    return rates


def with_rates(
    direction: optax.GradientTransformation, rates: Mapping[str, ParamRates]
) -> optax.GradientTransformation:
    """Return a transformation of directions, with peak learning rates and decays."""
    empty_state = optax.MaskedState(optax.EmptyState())
    return optax.chain(direction, add_decay(rates, empty_state), scale_by_rate(rates))


def add_decay(
    rates: Mapping[str, ParamRates], empty_state: Any
) -> optax.GradientTransformation:
    """Return a transformation that adds each parameter's decay to its direction.

    `empty_state` is what the transformation has in the state of an optimizer.
    """

    def add(path: tuple[Any, ...], direction: jax.Array, param: jax.Array) -> jax.Array:
        decay = rates[parameter_name(path)].weight_decay
        return direction + decay * param if decay else direction

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree_util.tree_map_with_path(add, updates, params), state

    return optax.GradientTransformation(lambda params: empty_state, update)


def scale_by_rate(rates: Mapping[str, ParamRates]) -> optax.GradientTransformation:
    """Return a transformation that multiplies directions by peak learning rates."""

    def scale(path: tuple[Any, ...], direction: jax.Array) -> jax.Array:
        return rates[parameter_name(path)].learning_rate * direction

    return optax.stateless(
        lambda directions, _: jax.tree_util.tree_map_with_path(scale, directions)
    )


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of the parameter at a path of a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
