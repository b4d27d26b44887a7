"""The collectives of a device: gathers of parameters, reductions, and resharding.

A parameter is gathered once in each loop that uses it, forward and backward, in the
dtype of its use. A sum over the batch is reduced in the loop that computes the sum. The
result of a product is reduce-scattered along the axes that shard the parameter.

Definitions of payload and sent: train/plan/cost.py.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from model.axes import mesh_axes
from train.mesh_sizes import num_shards
from train.plan.estimated.arrays import Axes, Dim, LocalArray, OperationPosition


class Exchange(NamedTuple):
    """A collective of a step.

    payload: the payload of all `count` executions in a step together.
    label: the part of the model that uses the result, for printing.
    section: the section of the step (train/plan/sections.py).
    members: the positions along `axes` of the devices in one group; () means all.
    """

    axes: Axes
    kind: str
    count: int
    payload: float
    label: str
    section: str
    in_layers: bool
    members: tuple[int, ...] = ()


class CollectiveRecorder:
    """Records the collectives of a device."""

    def __init__(self, sizes: Mapping[str, int], platform: str, microbatches: int):
        """Start without collectives, on a mesh with axes of the given sizes."""
        self.sizes, self.platform, self._microbatches = sizes, platform, microbatches
        self.exchanges: list[Exchange] = []
        self._gathered = set[tuple[int, LocalArray, Axes, bool]]()

    def add(
        self,
        axes: Axes,
        kind: str,
        payload: float,
        position: OperationPosition,
        label: str = "",
        members: tuple[int, ...] = (),
    ) -> None:
        """Record a collective that runs `position.count` times."""
        axes, count = self.nontrivial_axes(axes), position.count
        if "copies" in position.scope:  # once in each step (train/rows.py)
            count //= self._microbatches
        if axes and payload and count:
            label = label or position.scope.strip("/").split("/")[-1]
            exchange = Exchange(
                axes,
                kind,
                count,
                count * payload,
                label,
                section=position.section,
                in_layers=position.in_layers,
                members=members,
            )
            self.exchanges.append(exchange)

    def nontrivial_axes(self, axes: Axes) -> Axes:
        """Return the axes with more than one device, in the mesh's order."""
        if not axes:
            return ()
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    def axes_by_dim(self, spec: Sequence, rank: int) -> list[Axes]:
        """Return for each dim of a PartitionSpec the axes with more than one device."""
        axes = [self.nontrivial_axes(mesh_axes(entry)) for entry in spec]
        return axes + [()] * (rank - len(axes))

    def gather(
        self, array: LocalArray, axes: Axes, position: OperationPosition
    ) -> None:
        """Record the gather of a parameter, unless this loop has gathered it already.

        XLA:GPU gathers parameters again for rematerialisation.
        """
        axes = self.nontrivial_axes(axes)
        rematerialises = position.is_recomputed and self.platform == "gpu"
        key = (position.body, array.source, axes, rematerialises)
        if axes and key not in self._gathered:
            self._gathered.add(key)
            payload = array.bytes * num_shards(self.sizes, axes)
            self.add(axes, "all-gather", payload, position, array.label)

    def reduce(self, array: LocalArray, axes: Axes, label: str = "") -> None:
        """Record the reduction of an array's partial sums, scattered along `axes`.

        Partial sums of the same axes and size in one loop count once, because they are
        added up locally first.
        """
        recorded = set[tuple[Axes, int, int]]()
        for term in array.sums:
            key = term.axes, term.bytes, term.position.body
            was_reduced, term.is_reduced = term.is_reduced or key in recorded, True
            if was_reduced:
                continue
            recorded.add(key)
            scattered = tuple(a for a in term.axes if a in axes and a not in array.axes)
            other_axes = tuple(a for a in term.axes if a not in scattered)
            scatters = term.is_product and self.platform != "cpu"
            kind = "reduce-scatter" if scatters else "all-reduce"
            self.add(scattered, kind, term.bytes, term.position, label)
            local_bytes = term.bytes / num_shards(self.sizes, scattered)
            self.add(other_axes, "all-reduce", local_bytes, term.position, label)

    def reshard(
        self,
        array: LocalArray,
        spec: Sequence,
        position: OperationPosition,
        strict: bool = False,
    ) -> tuple[Dim, ...]:
        """Record the resharding of an array to a PartitionSpec; return the new dims.

        A parameter keeps the axes that the spec drops unless `strict`, because XLA
        chooses the sharding of parameters by the operations that follow.
        """
        target_axes_by_dim = self.axes_by_dim(spec, len(array.dims))
        target_axes = {axis for axes in target_axes_by_dim for axis in axes}
        self.reduce(array, tuple(target_axes))
        strict = strict or array.from_batch
        dims, moved, dropped = list[Dim](), (), ()
        for dim, axes in zip(array.dims, target_axes_by_dim, strict=True):
            moved += tuple(a for a in dim.axes if a not in axes and a in target_axes)
            lost_axes = tuple(a for a in dim.axes if a not in target_axes)
            dropped += lost_axes if strict else ()
            axes += () if strict else lost_axes
            size = dim.size * num_shards(self.sizes, dim.axes)
            local_size = -(-size // num_shards(self.sizes, axes))
            dims.append(Dim(local_size, axes, dim.is_known))
        self.add(moved, "all-to-all", array.bytes, position, array.label)
        gathered_bytes = array.bytes * num_shards(self.sizes, dropped)
        self.add(dropped, "all-gather", gathered_bytes, position, array.label)
        return tuple(dims)
