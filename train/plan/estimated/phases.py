"""Split a collective into phases, each over one network.

A collective within a TPU slice has one phase. A collective on GPUs also has one phase,
because its rings go through all nodes. XLA splits a collective across TPU slices into
two phases, so that each chip sends only its share between slices. A gather runs between
slices first and then within a slice. A reduction runs as an all-reduce within a slice
and then between slices. All other collectives go through the hosts entirely.
"""

import functools
from collections.abc import Iterator

from jax.sharding import Mesh

from model.gather import AxisSteps, scatter_groups
from train.hardware.chips import chip_of
from train.hardware.interconnect import Group, group_along, num_slices_along
from train.plan.cost import CollectiveTotal, sent_bytes
from train.plan.estimated.collectives import Exchange
from train.plan.sections import outermost_part


def phases(
    exchange: Exchange, mesh: Mesh, steps: tuple[AxisSteps, ...] = ()
) -> Iterator[CollectiveTotal]:
    """Yield the phases of an exchange, in no particular order.

    No schedule is known. On TPUs, all collectives in layers count as overlapped with
    products. On GPUs none do (plan/roofline.py).

    Args:
        exchange: the collective.
        mesh: the mesh of the devices.
        steps: the steps of collectives within a slice (model/gather.py). An exchange
            with `members` is already one step.
    """
    group, slices = _group(exchange.axes, exchange.members, mesh)
    on_tpu = mesh.devices.flat[0].platform == "tpu"

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
            overlapped=float(on_tpu and exchange.position.in_layers),
            serves=outermost_part(exchange.position.scope),
            links=links,
        )

    if group.network != "DCN":
        for step in _in_steps(exchange, steps):
            group, _ = _group(step.axes, step.members, mesh, _dims(step.kind, mesh))
            yield make_phase(step, group.network, group.size, group.links)
        return
    kind, inner_size = exchange.kind, group.size // slices
    kinds = {"all-gather": kind, "reduce-scatter": "all-reduce", "all-reduce": kind}
    if inner_size > 1 and kind in kinds:
        in_slice = exchange._replace(kind=kinds[kind])
        yield make_phase(in_slice, "ICI", inner_size, group.links)
        exchange = exchange._replace(payload=exchange.payload / inner_size)
    yield make_phase(exchange, "DCN", slices)


def _dims(kind: str, mesh: Mesh) -> int | None:
    """Return the dims of the torus that a collective uses at once; None means all."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    is_ring = kind == "reduce-scatter" and chip and chip.scatters_in_one_step
    return 1 if is_ring else None


def _in_steps(exchange: Exchange, steps: tuple[AxisSteps, ...]) -> Iterator[Exchange]:
    """Yield the steps of a gather or scatter along one axis, or the exchange itself."""
    sizes: tuple[int, ...] = ()
    if not exchange.members and len(exchange.axes) == 1:
        for step in steps:
            if step.axis == exchange.axes[0]:
                by_kind = {"reduce-scatter": step.scatter, "all-gather": step.gather}
                sizes = by_kind.get(exchange.kind, ())
    for groups in scatter_groups(sizes):
        members = tuple(groups[0]) if groups else exchange.members
        exchange = exchange._replace(members=members)
        yield exchange
        exchange = exchange._replace(payload=exchange.payload / max(1, len(members)))


@functools.lru_cache(maxsize=128)
def _group(
    axes: tuple[str, ...],
    members: tuple[int, ...],
    mesh: Mesh,
    dims: int | None = None,
) -> tuple[Group, int]:
    """Return the group of an exchange, and the number of slices that it spans."""
    slices = num_slices_along(mesh, axes, members)
    return group_along(axes, mesh, members, dims), slices
