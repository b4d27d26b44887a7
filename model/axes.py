"""Logical axes of the model's arrays, and the rules that shard them.

A logical axis says what a dim means ("embed", "heads"). A mesh axis is a direction of
the grid of devices ("fsdp", "tensor"). The two vocabularies are disjoint. A rule table
maps logical axes to mesh axes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None


def mesh_axes(entry: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of one dim as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def partition_spec(
    table: Mapping[str, MeshAxes], axes: tuple[str | None, ...]
) -> PartitionSpec:
    """Return the PartitionSpec of an array with these logical axes.

    A list of mesh axes leaves out an axis that is the whole rule of another dim. If
    `embed` has [fsdp, expert] and `experts` has expert, then a stack of experts'
    matrices has its embed dim on fsdp alone.

    Raises ValueError if an axis is missing from the table, or if two dims would be
    sharded over one mesh axis.
    """
    missing = [axis for axis in axes if axis is not None and axis not in table]
    if missing:
        raise ValueError(
            f"there is no rule for logical axis {missing[0]!r}: add it to the table of "
            f"its kind in configs/mesh/rules.yaml, with null for replicated"
        )
    entries = tuple(None if axis is None else table[axis] for axis in axes)
    whole_rules = {axes[0] for axes in map(mesh_axes, entries) if len(axes) == 1}
    entries = tuple(_leave_out(whole_rules, entry) for entry in entries)
    used_axes = [axis for entry in entries for axis in mesh_axes(entry)]
    repeated = {axis for axis in used_axes if used_axes.count(axis) > 1}
    if repeated:
        raise ValueError(
            f"two of the dims {axes} would be sharded over mesh axis "
            f"{sorted(repeated)[0]!r}; change one of their rules"
        )
    return PartitionSpec(*entries)


def _leave_out(left_out: set[str], entry: MeshAxes) -> MeshAxes:
    """Return an entry of several mesh axes without some of them."""
    axes = mesh_axes(entry)
    if len(axes) < 2:
        return entry
    return tuple(axis for axis in axes if axis not in left_out)


RuleTable = tuple[tuple[str, MeshAxes], ...]


class AxisRules(NamedTuple):
    """The rules for activations, including the batch, and for parameters."""

    activations: RuleTable = ()
    params: RuleTable = ()

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return an activation's PartitionSpec."""
        return partition_spec(dict(self.activations), axes)

    def param_spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return a parameter's PartitionSpec."""
        return partition_spec(dict(self.params), axes)
