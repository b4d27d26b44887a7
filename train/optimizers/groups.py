"""Groups of parameters that have another learning rate or another weight decay."""

from fnmatch import fnmatchcase
from typing import Any

from data.errors import Mistake
from model.params import is_info, named
from train.config import OptimizerConfig, ParameterGroup
from train.errors import ConfigError


def group_of_parameters(
    config: OptimizerConfig, infos: Any
) -> dict[str, ParameterGroup]:
    """Return the group of each parameter that has one, by the parameter's dotted name.

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
    return {
        name: group
        for group, names in zip(config.groups, members, strict=True)
        for name in names
    }


def group_members(config: OptimizerConfig, infos: Any) -> list[list[str]]:
    """Return the parameters of each group: those that no earlier group matches."""
    members: list[list[str]] = [[] for _ in config.groups]
    for name, _ in named(infos, is_info):
        for group, names in zip(config.groups, members, strict=True):
            if fnmatchcase(name, group.match):
                names.append(name)
                break
    return members
