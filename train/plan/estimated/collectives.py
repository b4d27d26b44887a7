"""The collectives of a device: those of per-device programs, and XLA's own.

XLA reduces a partial sum where an operation needs the complete sum. If the next
constraint shards the sum along the same axes, the sum of a product is reduce-scattered.

A collective within a TPU slice has one phase. A collective on GPUs also has one phase,
because its rings go through all nodes. XLA splits a collective across TPU slices into
two phases, so that each chip sends only its share between slices. A gather runs between
slices first and then within a slice. A reduction runs as an all-reduce within a slice
and then between slices. All other collectives go through the hosts entirely.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from model.axes import mesh_axes
from model.gather import AxisSteps, scatter_groups
from model.parts.experts.exchange import CAPACITY_FACTOR
from train.core.shards import num_shards
from train.hardware.chips import Chip, chip_of
from train.hardware.interconnect import Group, group_along, num_slices_along
from train.plan.cost import CollectiveTotal, sent_bytes
from train.plan.estimated.arrays import Axes, Dim, LocalArray, StepPosition
from train.plan.sections import outermost_part

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
# The fraction of the permutes of windowed products that overlaps with products. Source:
# MaxText's 32B on v5p-128, fsdp 16 x tensor 4, compiled (docs/log/planner.md).
_WINDOWED_HIDDEN = 0.65


class Exchange(NamedTuple):
    """A collective of a step.

    payload: the sum over all executions in a step together (definition: plan/cost.py).
    members: the positions along `axes` of the devices in one group; () means all.
    is_windowed: whether the collective is a ring of permutes around a product's parts.
    """

    axes: Axes
    kind: str
    payload: float
    position: StepPosition
    members: tuple[int, ...] = ()
    is_windowed: bool = False


class CollectiveRecorder:
    """Records the collectives of a device of a mesh with axes of the given sizes."""

    def __init__(self, sizes: Mapping[str, int], platform: str):
        self.sizes = sizes
        self._platform = platform
        self.exchanges: list[Exchange] = []
        self.position = StepPosition(1, "")  # the walk sets it before each equation
        # The dims of each table from which ids select rows; gradients have them too.
        self.table_dims: dict[LocalArray, tuple[Dim, ...]] = {}
        self._gathered: dict[tuple[LocalArray, Axes], LocalArray] = {}

    def nontrivial_axes(self, axes: Axes) -> Axes:
        """Return the axes with more than one device, in the mesh's order."""
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    def axes_by_dim(self, spec: Sequence, rank: int) -> list[Axes]:
        """Return for each dim of a PartitionSpec the axes with more than one device."""
        axes = [self.nontrivial_axes(mesh_axes(entry)) for entry in spec]
        return axes + [()] * (rank - len(axes))

    def reduce(self, array: LocalArray, axes: Axes) -> None:
        """Record the reduction of an array's partial sums, scattered along `axes`.

        Sums are also scattered along the axes that shard the array already.
        """
        # Terms of the same size are added up before they are reduced.
        added = set[tuple[Axes, int]]()
        for term in array.sums:
            if term.is_reduced:
                continue
            scattered = tuple(a for a in term.axes if a in (*axes, *array.axes))
            others = tuple(a for a in term.axes if a not in scattered)
            if scattered and self._platform == "tpu" and term.is_activation:
                # XLA scatters each of these sums together with its product.
                self._add_windowed(scattered, term.bytes, term.position)
            elif (term.axes, term.bytes) in added:
                continue
            else:
                added.add((term.axes, term.bytes))
                kind = "reduce-scatter" if term.is_product else "all-reduce"
                self._add(Exchange(scattered, kind, term.bytes, term.position))
            local_bytes = term.bytes / num_shards(self.sizes, scattered)
            self._add(Exchange(others, "all-reduce", local_bytes, term.position))
        for term in array.sums:
            term.is_reduced = True

    def gather(self, array: LocalArray, axes: Collection[str]) -> LocalArray:
        """Record the gathering of a product's operand, and return the whole operand.

        An activation is gathered once, however many products use it.
        """
        dropped = tuple(axis for axis in array.axes if axis in axes)
        if not dropped:
            return array
        kept = [tuple(a for a in dim.axes if a not in dropped) for dim in array.dims]
        if not array.from_batch:
            return array.with_dims(self.reshard(array, kept))
        key = array.origin, dropped
        if key not in self._gathered:
            if self._platform == "tpu":
                self.reduce(array, array.axes)
                gathered_bytes = array.bytes * num_shards(self.sizes, dropped)
                self._add_windowed(dropped, gathered_bytes, self.position)
                pairs = zip(array.dims, kept, strict=True)
                dims = [dim.reshard(axes, self.sizes) for dim, axes in pairs]
            else:
                dims = self.reshard(array, kept)
            self._gathered[key] = array.with_dims(dims)
        return self._gathered[key]

    def _add_windowed(self, axes: Axes, payload: float, position: StepPosition) -> None:
        """Record the permutes that gather an operand or scatter a product's result."""
        n = num_shards(self.sizes, axes)
        position = position._replace(count=position.count * (n - 1))
        exchange = Exchange(axes, "collective-permute", payload / n, position)
        self._add(exchange._replace(is_windowed=True))

    def reshard(
        self, array: LocalArray, axes_by_dim: Sequence[Axes]
    ) -> tuple[Dim, ...]:
        """Record the resharding of an array, and return its dims after it."""
        new_axes = {axis for axes in axes_by_dim for axis in axes}
        self.reduce(array, tuple(new_axes))
        dropped = tuple(axis for axis in array.axes if axis not in new_axes)
        pairs = [*zip(array.dims, axes_by_dim, strict=True)]
        lost = (axis for dim, axes in pairs for axis in dim.axes if axis not in axes)
        moved = tuple(axis for axis in lost if axis in new_axes)
        self._add(Exchange(moved, "all-to-all", array.bytes, self.position))
        gathered_bytes = array.bytes * num_shards(self.sizes, dropped)
        self._add(Exchange(dropped, "all-gather", gathered_bytes, self.position))
        return tuple(dim.reshard(axes, self.sizes) for dim, axes in pairs)

    def exchange(
        self, name: str, params: Any, operands: list[LocalArray]
    ) -> list[tuple[Dim, ...]]:
        """Record a collective of a per-device program; return the results' dims."""
        kind = COLLECTIVES[name]
        axes = mesh_axes(params.get("axis_name") or params.get("axes"))
        if kind == "ragged-all-to-all":
            array, output, *_ = operands
            # The larger buffer is the receiver's, with its spare capacity.
            payload = max(array.bytes, output.bytes) / CAPACITY_FACTOR
            if self._platform == "tpu":  # XLA sends whole vectors
                width = array.dims[-1].size
                payload *= -(-width // _LANES) * _LANES / width
            self._add(Exchange(axes, kind, payload, self.position))
            return [output.dims]
        groups = params.get("axis_index_groups")
        members = tuple(groups[0]) if groups else ()
        n = len(members) or num_shards(self.sizes, axes)  # devices in a group
        grown_dim = params.get("all_gather_dimension", params.get("concat_axis"))
        split_dim = params.get("scatter_dimension", params.get("split_axis"))
        results = []
        for array in operands:
            payload = array.bytes * (n if kind == "all-gather" else 1)
            self._add(Exchange(axes, kind, payload, self.position, members))
            dims = list[Dim]()
            for i, dim in enumerate(array.dims):
                size = dim.size * n if i == grown_dim else dim.size
                dims.append(dim._replace(size=size // n if i == split_dim else size))
            if kind == "all-gather" and not params["tiled"]:  # the parts are stacked
                dims = [*array.dims[:grown_dim], Dim(n), *array.dims[grown_dim:]]
            results.append(tuple(dims))
        return results

    def _add(self, exchange: Exchange) -> None:
        """Record a collective, given the payload of one execution."""
        axes = self.nontrivial_axes(exchange.axes)
        count = exchange.position.count
        if axes and exchange.payload and count:
            payload = count * exchange.payload
            self.exchanges.append(exchange._replace(axes=axes, payload=payload))


def phases(
    exchange: Exchange,
    mesh: Mesh,
    steps: tuple[AxisSteps, ...] = (),
    has_experts: bool = False,
) -> Iterator[CollectiveTotal]:
    """Yield the phases of an exchange, in no particular order.

    `steps` has the steps of collectives within a slice (model/gather.py). An exchange
    with `members` is already one step. No schedule is known (`_hidden_fraction`).
    """
    group, slices = _group(exchange.axes, exchange.members, mesh)
    chip = chip_of(mesh.devices.flat[0].device_kind)
    is_ring = chip is not None and chip.scatters_in_one_step

    def make_phase(
        exchange: Exchange, network: str, size: int, links: int = 0
    ) -> CollectiveTotal:
        return CollectiveTotal(
            axes=exchange.axes,
            network=network,
            kind=exchange.kind,
            count=exchange.position.count,
            payload=round(exchange.payload),
            sent=sent_bytes(exchange.kind, exchange.payload, size),
            overlapped=_hidden_fraction(exchange, network, chip, has_experts),
            serves=outermost_part(exchange.position.scope),
            links=links,
        )

    if group.network != "DCN":
        for step in _in_steps(exchange, steps):
            # None: all dims of the torus at once.
            dims = 1 if is_ring and step.kind == "reduce-scatter" else None
            group, _ = _group(step.axes, step.members, mesh, dims)
            if step.kind == "collective-permute" and group.links:
                group = replace(group, links=1)  # to one neighbour
            yield make_phase(step, group.network, group.size, group.links)
        return
    kind = exchange.kind
    inner_size = group.size // slices
    kinds = {"all-gather": kind, "reduce-scatter": "all-reduce", "all-reduce": kind}
    if inner_size > 1 and kind in kinds:
        in_slice = exchange._replace(kind=kinds[kind])
        yield make_phase(in_slice, "ICI", inner_size, group.links)
        exchange = exchange._replace(payload=exchange.payload / inner_size)
    yield make_phase(exchange, "DCN", slices)


def _hidden_fraction(
    exchange: Exchange, network: str, chip: Chip | None, has_experts: bool
) -> float:
    """Return the fraction of a collective that is overlapped with products.

    On GPUs it is 0, because their predicted time includes the overlap of collectives
    (plan/roofline.py). On TPUs it is what compiled steps show: collectives between
    slices and rings of permutes are overlapped, others in layers with experts are not,
    and the rest depends on the chip.
    """
    if chip is None or chip.matrix_unit is None or not exchange.position.in_layers:
        return 0.0
    if exchange.is_windowed:
        return _WINDOWED_HIDDEN
    if network == "DCN" or exchange.kind == "collective-permute":
        return 1.0
    if has_experts:
        return 0.0
    return chip.hidden.get(exchange.kind, 0.0)


def _in_steps(exchange: Exchange, steps: tuple[AxisSteps, ...]) -> Iterator[Exchange]:
    """Yield the steps of a gather or scatter along one axis, or the exchange itself."""
    sizes: tuple[int, ...] = ()
    for step in steps:
        if exchange.axes == (step.axis,) and not exchange.members:
            by_kind = {"reduce-scatter": step.scatter, "all-gather": step.gather}
            sizes = by_kind.get(exchange.kind, ())
    for groups in scatter_groups(sizes):
        members = tuple(groups[0]) if groups else exchange.members
        exchange = exchange._replace(members=members)
        yield exchange
        exchange = exchange._replace(payload=exchange.payload / max(1, len(members)))


@functools.lru_cache(maxsize=128)
def _group(
    axes: Axes, members: tuple[int, ...], mesh: Mesh, dims: int | None = None
) -> tuple[Group, int]:
    """Return the group of an exchange, and the number of slices that it spans."""
    slices = num_slices_along(mesh, axes, members)
    return group_along(axes, mesh, members, dims), slices
