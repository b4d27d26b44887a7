"""The learning rate and the weight decay of each parameter."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import optax

from model.params import Kind, is_info, named
from train.config import OptimizerConfig, OptimizerName, ParameterGroup
from train.core.optimizer.factors import Factors
from train.errors import ConfigError, Mistake


class ParamRates(NamedTuple):
    """The peak learning rate of a parameter, and its decay relative to that rate.

    epsilon: a factor on Adam's epsilon.
    """

    learning_rate: float
    weight_decay: float
    epsilon: float = 1.0


def parameter_rates(
    config: OptimizerConfig, infos: Any, factors: Mapping[str, Factors]
) -> dict[str, ParamRates]:
    """Return the rates of each parameter by its dotted name. Vectors do not decay.

    `factors` are those of `transfer_factors`.

    Raises:
        ConfigError: a group of `optimizer.groups` has no parameter.
    """
    members = group_members(config, infos)
    if mistakes := [
        Mistake(
            f"optimizer.groups[{i}].match",
            group.match,
            "must match a parameter that no earlier group matches; their names are "
            "like layers.0.0.mlp.up.weight (python -m train.plan lists them)",
        )
        for i, group in enumerate(config.groups)
        if not members[i]
    ]:
        raise ConfigError(mistakes)
    group_of = {
        name: group
        for group, names in zip(config.groups, members, strict=True)
        for name in names
    }
    rates = dict[str, ParamRates]()
    for name, info in named(infos, is_info):
        rate = config.learning_rate
        decay = config.weight_decay
        if config.name is OptimizerName.muon and info.kind is Kind.matrix:
            rate = config.muon_learning_rate
            decay = config.muon_weight_decay
        if info.kind is Kind.vector:
            decay = 0.0
        group = group_of.get(name, ParameterGroup())
        if group.weight_decay is not None:
            decay = group.weight_decay
        own = factors.get(name, Factors())
        rate *= group.learning_rate * own.learning_rate
        rates[name] = ParamRates(rate, decay / own.learning_rate, own.epsilon)
    return rates


def group_members(config: OptimizerConfig, infos: Any) -> list[list[str]]:
    """Return the parameters of each group: those that no earlier group matches."""
    members: list[list[str]] = [[] for _ in config.groups]
    for name, _ in named(infos, is_info):
        for group, names in zip(config.groups, members, strict=True):
            if fnmatchcase(name, group.match):
                names.append(name)
                break
    return members


def add_decay(
    rates: Mapping[str, ParamRates], empty_state: Any
) -> optax.GradientTransformation:
    """Return a transformation that adds each parameter's decay to its direction.

    `empty_state` is what the transformation has in the state of an optimizer.
    """

    def add(path: tuple[Any, ...], direction: jax.Array, param: jax.Array) -> jax.Array:
        decay = rates[_name(path)].weight_decay
        return direction + decay * param if decay else direction

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree_util.tree_map_with_path(add, updates, params), state

    return optax.GradientTransformation(lambda params: empty_state, update)


def with_epsilons(
    adam: optax.GradientTransformation, rates: Mapping[str, ParamRates]
) -> optax.GradientTransformation:
    """Return Adam with another epsilon for each parameter.

    If a gradient is divided by f, Adam's direction is the one with f times the epsilon.
    """

    def divide(path: tuple[Any, ...], grad: jax.Array) -> jax.Array:
        factor = rates[_name(path)].epsilon
        return grad if factor == 1 else grad / factor

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates = jax.tree_util.tree_map_with_path(divide, updates)
        return adam.update(updates, state, params)

    return optax.GradientTransformation(adam.init, update)


def scale_by_rate(rates: Mapping[str, ParamRates]) -> optax.GradientTransformation:
    """Return a transformation that multiplies directions by peak learning rates."""

    def scale(path: tuple[Any, ...], direction: jax.Array) -> jax.Array:
        return rates[_name(path)].learning_rate * direction

    return optax.stateless(
        lambda directions, _: jax.tree_util.tree_map_with_path(scale, directions)
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
