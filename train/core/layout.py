"""The mesh of a program, and the sharding of every leaf of its state.

Initialisation, the step, checkpoint restore and the plan all use these shardings.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.axes import AxisRules
from model.params import is_of_layers, named
from train.core.shards import num_shards
from train.core.state import TrainState


@dataclass(frozen=True)
class StateLayout:
    """The sharding of parameters, moments and batch on a mesh.

    param_specs: tree of the PartitionSpec of each parameter.
    rules: the mesh axes of each logical axis of activations and parameters.
    offload: whether the moments of matrices and tables are in host memory.
    """

    mesh: Mesh
    param_specs: Any
    rules: AxisRules
    offload: bool = False

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of the fields of a batch [B, T]."""
        return NamedSharding(self.mesh, self.rules.spec("batch", "seq"))

    @property
    def batch_shards(self) -> "BatchShards":
        """How many shards the batch has along its rows and along positions."""
        return batch_shards(self.rules, self.mesh.shape)


class BatchShards(NamedTuple):
    """How many shards a batch has along its rows and along the positions of a row."""

    rows: int
    sequence: int


def batch_shards(rules: AxisRules, sizes: Mapping[str, int]) -> BatchShards:
    """Return how many shards a batch has on a mesh with these axis sizes."""
    rows, sequence = rules.spec("batch", "seq")
    return BatchShards(num_shards(sizes, rows), num_shards(sizes, sequence))


def state_shardings(abstract_state: TrainState, layout: StateLayout) -> TrainState:
    """Return the `NamedSharding` of every leaf of a train state.

    An optimizer's leaf belongs to a parameter if

    1. its path ends in the parameter's path, perhaps followed by one name (`codes`,
       `rows`), and
    2. each of its dims has the size of the parameter's dim, or the size 1.

    Such a leaf is sharded like the parameter. All other leaves (step, counts) are
    replicated. Without these shardings, `jit` would replicate the moments. With
    `offload`, the leaves that `moments_of` lists are in host memory.
    """
    mesh = layout.mesh
    by_path = {
        path: (param.shape, spec)
        for (path, param), spec in zip(
            jax.tree_util.tree_leaves_with_path(abstract_state.params),
            jax.tree.leaves(
                layout.param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
            ),
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
    if not (layout.offload and hasattr(mesh.devices.flat[0], "client")):
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
