"""The collectives of a device: those of per-device programs, and XLA's own.

XLA reduces a partial sum where an operation needs the complete sum. If the next
constraint shards the sum along the same axes, the sum of a product is reduce-scattered.

Definitions of payload and sent: train/plan/cost.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from model.axes import mesh_axes
from train.mesh_sizes import num_shards
from train.plan.estimated.arrays import Axes, Dim, LocalArray, Position

COLLECTIVES = {  # the kinds of collectives, by primitive
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "ppermute": "collective-permute",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
_LANES = 128  # the lanes of a TPU's vectors


class Exchange(NamedTuple):
    """A collective of a step.

    payload: the payload of all executions in a step together.
    members: the positions along `axes` of the devices in one group; () means all.
    """

    axes: Axes
    kind: str
    payload: float
    position: Position
    members: tuple[int, ...] = ()


class CollectiveRecorder:
    """Records the collectives of a device."""

    def __init__(self, sizes: Mapping[str, int], platform: str):
        """Start without collectives, on a mesh with axes of the given sizes."""
        self.sizes, self._platform = sizes, platform
        self.exchanges: list[Exchange] = []
        # The dims of each table from which ids select rows; gradients have them too.
        self.table_dims: dict[LocalArray, tuple[Dim, ...]] = {}

    def nontrivial_axes(self, axes: Axes) -> Axes:
        """Return the axes with more than one device, in the mesh's order."""
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    def axes_by_dim(self, spec: Sequence, rank: int) -> list[Axes]:
        """Return for each dim of a PartitionSpec the axes with more than one device."""
        axes = [self.nontrivial_axes(mesh_axes(entry)) for entry in spec]
        return axes + [()] * (rank - len(axes))

    def reduce(self, array: LocalArray, axes: Axes) -> None:
        """Record the reduction of an array's partial sums, scattered along `axes`."""
        recorded = set[tuple[Axes, int]]()
        for term in array.sums:
            key = term.axes, term.bytes
            was_reduced, term.is_reduced = term.is_reduced or key in recorded, True
            if not was_reduced:
                recorded.add(key)
                new = [a for a in term.axes if a in axes and a not in array.axes]
                scattered = tuple(new)
                others = tuple(a for a in term.axes if a not in scattered)
                kind = "reduce-scatter" if term.is_product else "all-reduce"
                self._add(scattered, kind, term.bytes, term.position)
                local_bytes = term.bytes / num_shards(self.sizes, scattered)
                self._add(others, "all-reduce", local_bytes, term.position)

    def gather(self, array: LocalArray, axes: Axes, position: Position) -> LocalArray:
        """Record the gather of an array along some axes, and return the result."""
        kept = [tuple(a for a in dim.axes if a not in axes) for dim in array.dims]
        dims = self.reshard(array, kept, position)
        from_batch = array.from_batch
        return LocalArray(dims, array.itemsize, from_batch, source=array.origin)

    def reshard(
        self, array: LocalArray, axes_by_dim: Sequence[Axes], position: Position
    ) -> tuple[Dim, ...]:
        """Record the resharding of an array, and return its dims after it."""
        new_axes = {axis for axes in axes_by_dim for axis in axes}
        self.reduce(array, tuple(new_axes))
        dropped = tuple(axis for axis in array.axes if axis not in new_axes)
        pairs = [*zip(array.dims, axes_by_dim, strict=True)]
        lost = (axis for dim, axes in pairs for axis in dim.axes if axis not in axes)
        moved = tuple(axis for axis in lost if axis in new_axes)
        self._add(moved, "all-to-all", array.bytes, position)
        gathered_bytes = array.bytes * num_shards(self.sizes, dropped)
        self._add(dropped, "all-gather", gathered_bytes, position)
        return tuple(dim.reshard(axes, self.sizes) for dim, axes in pairs)

    def exchange(
        self, name: str, params: Any, operands: list[LocalArray], position: Position
    ) -> list[tuple[Dim, ...]]:
        """Record a collective of a per-device program; return the results' dims."""
        kind = COLLECTIVES[name]
        axes = mesh_axes(params.get("axis_name") or params.get("axes"))
        if kind == "ragged-all-to-all":
            array, output, *_ = operands
            payload = min(array.bytes, output.bytes)
            if len(array.dims) == 1 and self._platform == "tpu":
                payload *= _LANES  # XLA sends whole vectors
            self._add(axes, kind, payload, position)
            return [output.dims]
        groups = params.get("axis_index_groups")
        members = tuple(groups[0]) if groups else ()
        n = len(members) or num_shards(self.sizes, axes)  # devices in a group
        grown_dim = params.get("all_gather_dimension", params.get("concat_axis"))
        split_dim = params.get("scatter_dimension", params.get("split_axis"))
        results = []
        for array in operands:
            dims = list(array.dims)
            if grown_dim is not None:
                dim = dims[grown_dim]
                dims[grown_dim] = dim._replace(size=dim.size * n)
            if split_dim is not None:
                dim = dims[split_dim]
                dims[split_dim] = dim._replace(size=dim.size // n)
            payload = array.bytes * (n if kind == "all-gather" else 1)
            self._add(axes, kind, payload, position, members)
            results.append(tuple(dims))
        return results

    def _add(
        self,
        axes: Axes,
        kind: str,
        payload: float,
        position: Position,
        members: tuple[int, ...] = (),
    ) -> None:
        axes = self.nontrivial_axes(axes)
        if axes and payload and position.count:
            payload *= position.count
            self.exchanges.append(Exchange(axes, kind, payload, position, members))
