"""The logical axes of the model's arrays, and the rules that place them.

A logical axis says what a dim *is* ("embed", "heads"); a mesh axis says where the
machine is wide ("fsdp", "tensor"). The two vocabularies are disjoint. A rule table
maps the first to the second; `AxisRules` carries the table for activations into the
model, which stays ignorant of meshes: with no rules it runs on one device untouched.
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
        ValueError: if a name is missing from the table, or if two dims would lie on
            one mesh axis.
    """
    missing = [axis for axis in axes if axis is not None and axis not in table]
    if missing:
        raise ValueError(
            f"no rule for logical axis {missing[0]!r}: add it to the table of its "
            f"kind in configs/mesh/rules.yaml, null for replicated"
        )
    entries = tuple(None if axis is None else table[axis] for axis in axes)
    used = [axis for entry in entries for axis in mesh_axes(entry)]
    twice = {m for m in used if used.count(m) > 1}
    if twice:
        raise ValueError(
            f"dims {axes} would lie twice on mesh axis {sorted(twice)[0]!r}; "
            "change one of their rules"
        )
    return PartitionSpec(*entries)


Pairs = tuple[tuple[str, MeshAxes], ...]


@dataclass(frozen=True)
class AxisRules:
    """Where arrays lie, and which mesh axes the program takes care of by hand.

    activations, params: pairs (logical axis, mesh axes). Empty: anywhere.
    by_hand: mesh axes along which the program says itself what each device does, inside
        `jax.shard_map`: a device sees its own rows of the batch, or its own positions
        of them, and its own part of each weight. XLA's partitioner takes care of the
        other axes.
    sequence: of these, the ones along which devices have other positions of the same
        rows.
    rows_travel: whether devices that share a table W[V, D_fsdp] exchange the rows that
        they look up, because these are less than the table.
    """

    activations: Pairs = ()
    params: Pairs = ()
    by_hand: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    rows_travel: bool = False

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return an activation's PartitionSpec over the axes that XLA takes care of."""
        if not self.activations:
            return PartitionSpec()
        return self._automatic(partition_spec(dict(self.activations), axes))

    def param_spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Return a parameter's PartitionSpec over the axes that XLA takes care of."""
        if not self.params:
            return PartitionSpec()
        return self._automatic(partition_spec(dict(self.params), axes))

    def _automatic(self, spec: PartitionSpec) -> PartitionSpec:
        dims = [
            [a for a in mesh_axes(entry) if a not in self.by_hand] for entry in spec
        ]
        return PartitionSpec(*(_entry(dim) for dim in dims))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an activation to its place on the mesh in force (`jax.set_mesh`)."""
        if not self.activations:
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(*axes))

    def cut(self, axes: tuple[str, ...]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the dims of a parameter that lie in parts on other devices.

        Returns:
            Pairs (dim, mesh axes by hand and wider than one device, in their order).
        """
        if not self.by_hand:
            return ()
        spec = partition_spec(dict(self.params), axes)
        hand = [[a for a in mesh_axes(entry) if a in self.by_hand] for entry in spec]
        dims = [(i, wide(names)) for i, names in enumerate(hand)]
        return tuple((i, names) for i, names in dims if names)

    def inside(self, stages: str) -> "AxisRules":
        """Return the rules in a stage of a pipeline, whose rows lie on its devices.

        Args:
            stages: mesh axis by hand.
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
        """Return the axes by hand along which a parameter's parts are the same."""
        cut = {name for _, names in self.cut(axes) for name in names}
        return tuple(axis for axis in wide(self.by_hand) if axis not in cut)


def wide(axes: Iterable[str]) -> tuple[str, ...]:
    """Return those of some mesh axes by hand that are more than one device wide."""
    return tuple(axis for axis in axes if jax.lax.psum(1, axis) > 1)


def _entry(axes: list[str]) -> MeshAxes:
    return axes[0] if len(axes) == 1 else tuple(axes) or None


ANYWHERE = AxisRules()
