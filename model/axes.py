"""The logical axes of the model's arrays, and the rules that place them.

A logical axis says what a dim *is* ("embed", "heads"); a mesh axis says where the
machine is wide ("fsdp", "tensor"). The two vocabularies are disjoint. A rule table
maps the first to the second; `AxisRules` carries the table for activations into the
model, which stays ignorant of meshes: with no rules it runs on one device untouched.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

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


@dataclass(frozen=True)
class AxisRules:
    """Where activations lie.

    pairs: (logical axis, mesh axes). Empty: anywhere.
    lookup: mesh axes of (batch, embed) of what comes out of a table, if XLA has to be
        told.
    """

    pairs: tuple[tuple[str, MeshAxes], ...] = ()
    lookup: tuple[MeshAxes, MeshAxes] | None = None

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the PartitionSpec of an activation with these logical axes."""
        return partition_spec(dict(self.pairs), axes) if self.pairs else PartitionSpec()

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an activation to its place on the mesh in force (`jax.set_mesh`)."""
        if not self.pairs:
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(*axes))

    def constrain_lookup(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Pin rows that come out of a table W[V, D_fsdp], before `constrain` does.

        Each device looks up its part of D: x[B_data, T, D_fsdp]. One all-to-all makes
        x[B_(data, fsdp), T, D] of that. Left to itself XLA replicates x on the way,
        and again its gradient ("involuntary full rematerialization").
        """
        if self.lookup is None:
            return x_BTD
        batch, embed = self.lookup
        spec = PartitionSpec(batch, None, embed)
        return jax.lax.with_sharding_constraint(x_BTD, spec)


ANYWHERE = AxisRules()
