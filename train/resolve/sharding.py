"""Turn the rule tables of a config into the PartitionSpec of every parameter.

A rule table maps the logical axes of a parameter to mesh axes.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from data.errors import Mistake
from model.axes import AxisRules, MeshAxes, partition_spec
from model.params import ParamInfo
from train.config import MeshConfig
from train.errors import ConfigError
from train.resolve.mesh_sizes import dim_mistake


def _rule_table(table: dict[str, Any]) -> dict[str, MeshAxes]:
    """Return a configured rule table with tuples of mesh axes instead of lists."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def axis_rules(config: MeshConfig) -> AxisRules:
    """Return the rule tables of activations and parameters."""
    activations = _rule_table(config.activations)
    params = _rule_table(config.params)
    return AxisRules(tuple(activations.items()), tuple(params.items()))


def param_specs(
    params: Any, infos: Any, axis_sizes: Mapping[str, int], table: dict[str, Any]
) -> dict[str, Any]:
    """Return the PartitionSpec of each parameter under the table `mesh.params`.

    Raises:
        ConfigError: if mesh axes do not divide a dim, if a logical axis has no rule, or
            if two dims of a parameter are on one mesh axis; lists all mistakes.
    """
    rules = _rule_table(table)
    mistakes = dict[str, Mistake]()

    def spec(path: Any, param: Any, info: ParamInfo) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        try:
            entries = partition_spec(rules, info.axes)
        except ValueError as error:
            mistakes.setdefault(str(error), Mistake("mesh.params", name, str(error)))
            return PartitionSpec()
        result = PartitionSpec(*(_simplify(entry, axis_sizes) for entry in entries))
        for dim, axis, entry in zip(param.shape, info.axes, result, strict=True):
            dim_name = f"the {axis} dim {dim} of {name}"
            if mistake := dim_mistake(axis_sizes, str(axis), entry, dim, dim_name):
                mistakes.setdefault(mistake.key, mistake)
        return result

    specs = jax.tree_util.tree_map_with_path(spec, params, infos)
    if mistakes:
        raise ConfigError(list(mistakes.values()))
    return specs


def _simplify(entry: MeshAxes, axis_sizes: Mapping[str, int]) -> MeshAxes:
    """Remove mesh axes of size 1 from an entry with several axes; keep at least one."""
    if not isinstance(entry, tuple):
        return entry
    kept_axes = tuple(axis for axis in entry if axis_sizes[axis] > 1) or entry[:1]
    return kept_axes[0] if len(kept_axes) == 1 else kept_axes
