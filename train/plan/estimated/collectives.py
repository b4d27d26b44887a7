"""The collectives of a device: gathers of parameters, reductions, and resharding.

A parameter is gathered once in each loop that uses it, forward and backward, in the
dtype of its use. A sum over the batch is reduced in the loop that makes it. If a
product made it, it is scattered along the axes that shard the parameter.

Definitions of payload and sent: train/plan/cost.py.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from model.axes import mesh_axes
from train.mesh_sizes import num_shards
from train.plan.estimated.arrays import Axes, Dim, LocalArray, OperationPosition


class Exchange(NamedTuple):
    """A collective of a step; `payload` is of all `count` times that it runs.

    once: however many microbatches the step has (train/rows.py's scope).
    body: of the loop that it stands in.
    members: places along `axes` of the devices of one of its groups; (): all.
    """

    axes: Axes
    kind: str
    count: int
    payload: float
    serves: str
    in_layers: bool
    once: bool
    body: int
    members: tuple[int, ...] = ()


class Sending:
    """Collects what a device sends."""

    def __init__(self, sizes: Mapping[str, int], platform: str):
        """Start with nothing, on a mesh."""
        self.sizes, self.platform = sizes, platform
        self.exchanges: list[Exchange] = []
        self._gathered = set[tuple[int, LocalArray, Axes, bool]]()

    def add(
        self,
        axes: Axes,
        kind: str,
        payload: float,
        place: OperationPosition,
        label: str = "",
        members: tuple[int, ...] = (),
    ) -> None:
        """Count a collective as often as its place runs."""
        axes, times = self.wide(axes), place.times
        if axes and payload and times:
            label = label or place.scope.strip("/").split("/")[-1]
            exchange = Exchange(
                axes,
                kind,
                times,
                times * payload,
                label,
                in_layers=place.in_layers,
                once="copies" in place.scope,
                body=place.body,
                members=members,
            )
            self.exchanges.append(exchange)

    def wide(self, axes: Axes) -> Axes:
        """Return the axes of more than one device, in the mesh's order."""
        if not axes:
            return ()
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    def entries(self, spec: Sequence, rank: int) -> list[Axes]:
        """Return the wide axes of each dim of a PartitionSpec."""
        wide = [self.wide(mesh_axes(entry)) for entry in spec]
        return wide + [()] * (rank - len(wide))

    def gather(self, array: LocalArray, axes: Axes, place: OperationPosition) -> None:
        """Gather a parameter along axes, unless this loop has done so.

        XLA:GPU gathers again for recomputation.
        """
        axes = self.wide(axes)
        again = place.recomputed and self.platform == "gpu"
        key = (place.body, array.source, axes, again)
        if axes and key not in self._gathered:
            self._gathered.add(key)
            payload = array.bytes * num_shards(self.sizes, axes)
            self.add(axes, "all-gather", payload, place, array.label)

    def reduce(self, array: LocalArray, kept: Axes, label: str = "") -> None:
        """Reduce an array's partial sums; a device keeps its part along some axes.

        Sums that one loop has added up before are reduced together.
        """
        done = set[tuple[Axes, int, int]]()
        for part in array.sums:
            key = part.axes, part.bytes, part.place.body
            again, part.reduced = part.reduced or key in done, True
            if again:
                continue
            done.add(key)
            cut = tuple(a for a in part.axes if a in kept and a not in array.axes)
            rest = tuple(a for a in part.axes if a not in cut)
            scatter = part.is_product and self.platform != "cpu"
            kind = "reduce-scatter" if scatter else "all-reduce"
            self.add(cut, kind, part.bytes, part.place, label)
            left = part.bytes / num_shards(self.sizes, cut)
            self.add(rest, "all-reduce", left, part.place, label)

    def lay_out(
        self,
        array: LocalArray,
        spec: Sequence,
        place: OperationPosition,
        strict: bool = False,
    ) -> tuple[Dim, ...]:
        """Reshard an array to a PartitionSpec, and return its new dims.

        If an update drops a parameter's sharding, it is kept until the result, unless
        `strict`: XLA chooses free shardings by the operations that follow.
        """
        entries = self.entries(spec, len(array.dims))
        wanted = {axis for axes in entries for axis in axes}
        self.reduce(array, tuple(wanted))
        strict = strict or array.from_batch
        dims, moved, dropped = list[Dim](), (), ()
        for dim, axes in zip(array.dims, entries, strict=True):
            moved += tuple(a for a in dim.axes if a not in axes and a in wanted)
            lost = tuple(a for a in dim.axes if a not in wanted)
            dropped += lost if strict else ()
            axes += () if strict else lost
            size = dim.size * num_shards(self.sizes, dim.axes)
            dims.append(Dim(-(-size // num_shards(self.sizes, axes)), axes, dim.known))
        self.add(moved, "all-to-all", array.bytes, place, array.label)
        whole = array.bytes * num_shards(self.sizes, dropped)
        self.add(dropped, "all-gather", whole, place, array.label)
        return tuple(dims)
