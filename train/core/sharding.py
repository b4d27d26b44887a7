"""Decide the sharding of every leaf of the train state, from rule tables.

A rule table maps the logical axes of a parameter to mesh axes. `state_shardings` turns
the table into one `NamedSharding` per leaf of the train state. Initialisation, the
step, checkpoint restore and the plan all use these shardings.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.axes import AxisRules, MeshAxes, partition_spec
from model.params import ParamInfo, is_of_layers, named
from train.config import MeshConfig
from train.core.mesh_sizes import dim_mistake, num_shards
from train.errors import ConfigError, Mistake


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


def state_shardings(
    abstract_state: Any,
    infos: Any,
    mesh: Mesh,
    table: dict[str, Any],
    offload: bool = False,
) -> Any:
    """Return the `NamedSharding` of every leaf of a train state.

    An optimizer's leaf belongs to a parameter if

    1. its path ends in the parameter's path, perhaps followed by one name (`codes`,
       `rows`), and
    2. each of its dims has the size of the parameter's dim, or the size 1.

    Such a leaf is sharded like the parameter. All other leaves (step, counts) are
    replicated. Without these shardings, `jit` would replicate the moments. With
    `offload`, the leaves that `moments_of` lists are in host memory.
    """
    specs = param_specs(abstract_state.params, infos, mesh.shape, table)
    by_path = {
        path: (param.shape, spec)
        for (path, param), spec in zip(
            jax.tree_util.tree_leaves_with_path(abstract_state.params),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
    }

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        for start, stop in itertools.product(range(len(path)), (None, -1)):
            shape, spec = by_path.get(path[start:stop], ((), ()))
            if len(shape) != leaf.ndim or not spec:
                continue
            dims = [*zip(leaf.shape, shape, spec, strict=True)]
            if all(leaf_dim in (1, param_dim) for leaf_dim, param_dim, _ in dims):
                entries = (
                    entry if leaf_dim == param_dim else None
                    for leaf_dim, param_dim, entry in dims
                )
                return NamedSharding(mesh, PartitionSpec(*entries))
        return NamedSharding(mesh, PartitionSpec())

    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_state)
    # A plan's stand-ins for devices (`fake_devices`) have no client or memory kinds.
    if not (offload and hasattr(mesh.devices.flat[0], "client")):
        return shardings
    names = {name for name, _ in moments_of(abstract_state)}
    leaves = [
        sharding.with_memory_kind("pinned_host") if name in names else sharding
        for name, sharding in named(shardings)
    ]
    return jax.tree.unflatten(jax.tree.structure(shardings), leaves)


def moments_of(state: Any) -> list[tuple[str, Any]]:
    """Return the (name, leaf) pairs of the moments of matrices and embedding tables.

    The moments of vectors, such as the scales of norms, are too small to be offloaded.
    """
    prefix = "optimizer.transform."
    return [
        (name, leaf)
        for name, leaf in named(state)
        if name.startswith(prefix) and leaf.ndim > 1 + is_of_layers(name)
    ]


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Return how many bytes of an array one device holds."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    axis_sizes = sharding.mesh.shape
    shards = math.prod(num_shards(axis_sizes, entry) for entry in sharding.spec)
    return leaf.size * leaf.dtype.itemsize // shards
