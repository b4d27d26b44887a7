"""Logical axes of the model's arrays, and the rules that shard them.

A logical axis says what a dim means ("embed", "heads"). A mesh axis is a direction of
the grid of devices ("fsdp", "tensor"). The two vocabularies are disjoint. A rule table
maps logical axes to mesh axes. `AxisRules` passes the tables to the model. Without
rules the model runs on one device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax
from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None


def mesh_axes(entry: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of one dim as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def partition_spec(
    table: Mapping[str, MeshAxes], axes: tuple[str | None, ...]
) -> PartitionSpec:
    """Return the PartitionSpec of an array with these logical axes.

    Raises:
        ValueError: if a name is missing from the table, or if two dims would be sharded
            over one mesh axis.
    """
    missing = [axis for axis in axes if axis is not None and axis not in table]
    if missing:
        raise ValueError(
            f"there is no rule for logical axis {missing[0]!r}: add it to the table of "
            f"its kind in configs/mesh/rules.yaml, with null for replicated"
        )
    entries = tuple(None if axis is None else table[axis] for axis in axes)
    used = [axis for entry in entries for axis in mesh_axes(entry)]
    repeated = {m for m in used if used.count(m) > 1}
    if repeated:
        raise ValueError(
            f"two of the dims {axes} would be sharded over mesh axis "
            f"{sorted(repeated)[0]!r}; change one of their rules"
        )
    return PartitionSpec(*entries)


Pairs = tuple[tuple[str, MeshAxes], ...]


@dataclass(frozen=True)
class AxisRules:
    """How arrays are sharded, and which mesh axes are manual.

    activations, params: pairs (logical axis, mesh axes). If they are empty, there are
        no constraints.
    by_hand: the manual mesh axes. Inside `jax.shard_map`, the program states what each
        device does along them: a device has local rows of the batch, or local positions
        of rows, and a local part of each weight. XLA's partitioner handles all other
        axes.
    sequence: the manual axes along which devices have different positions of the same
        rows.
    rows_travel: whether devices that share a table W[V, D_fsdp] exchange the rows that
        they look up, because the rows are smaller than the table.
    """

    activations: Pairs = ()
    params: Pairs = ()
    by_hand: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    rows_travel: bool = False

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return an activation's PartitionSpec over the automatic axes."""
        if not self.activations:
            return PartitionSpec()
        return self._automatic(partition_spec(dict(self.activations), axes))

    def param_spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Return a parameter's PartitionSpec over the automatic axes."""
        if not self.params:
            return PartitionSpec()
        return self._automatic(partition_spec(dict(self.params), axes))

    def _automatic(self, spec: PartitionSpec) -> PartitionSpec:
        dims = [
            [a for a in mesh_axes(entry) if a not in self.by_hand] for entry in spec
        ]
        return PartitionSpec(*(_entry(dim) for dim in dims))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an activation's sharding on the current mesh (`jax.set_mesh`)."""
        if not self.activations:
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(*axes))

    def cut(self, axes: tuple[str, ...]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the dims of a parameter that are sharded over manual axes.

        Returns:
            Pairs (dim, manual mesh axes of more than one device, in their order).
        """
        if not self.by_hand:
            return ()
        spec = partition_spec(dict(self.params), axes)
        hand = [[a for a in mesh_axes(entry) if a in self.by_hand] for entry in spec]
        dims = [(i, wide(names)) for i, names in enumerate(hand)]
        return tuple((i, names) for i, names in dims if names)

    def inside(self, stages: str) -> "AxisRules":
        """Return the rules inside a stage of a pipeline.

        Args:
            stages: the manual mesh axis of the stages, which is removed.
        """

        def without(table: Pairs) -> Pairs:
            dims = ((name, [*mesh_axes(entry)]) for name, entry in table)
            return tuple((n, _entry([a for a in d if a != stages])) for n, d in dims)

        return replace(
            self,
            activations=without(self.activations),
            params=without(self.params),
            by_hand=tuple(axis for axis in self.by_hand if axis != stages),
        )

    def copies(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the manual mesh axes over which a parameter is replicated."""
        cut = {name for _, names in self.cut(axes) for name in names}
        return tuple(axis for axis in wide(self.by_hand) if axis not in cut)


def wide(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the manual mesh axes that have more than one device."""
    return tuple(axis for axis in axes if jax.lax.psum(1, axis) > 1)


def _entry(axes: list[str]) -> MeshAxes:
    return axes[0] if len(axes) == 1 else tuple(axes) or None


ANYWHERE = AxisRules()
