"""The phases of a collective, each over one network.

Within a slice, or on GPUs whose rings go through all nodes at once, there is one phase.
Of a group in several slices of TPUs XLA makes two, so that only a chip's share of what
its slice holds passes between slices: parts are gathered there first, then within the
slice; sums are added up within the slice, whole on each chip, then scattered. What
chips exchange with each other all goes by the hosts.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from model.gather import AxisSteps, nested
from train.hardware.interconnect import Group, group_along, num_parts
from train.plan.estimated.collectives import Exchange


class Phase(NamedTuple):
    """A collective over one network, among `size` devices."""

    exchange: Exchange
    network: str
    size: int
    links: int = 0  # as in `Group`


def phases(
    exchange: Exchange, mesh: Mesh, steps: tuple[AxisSteps, ...] = ()
) -> Iterator[Phase]:
    """Return the phases of an exchange, in no order.

    Args:
        exchange: what is sent.
        mesh: of the devices.
        steps: in which scatters within a slice go, if the exchange does not say.
    """
    group, slices = _group(exchange.axes, exchange.members, mesh)
    kind, payload, near = exchange.kind, exchange.payload, group.size // slices
    if group.network != "DCN":
        for part in _in_steps(exchange, steps):
            group, _ = _group(part.axes, part.members, mesh)
            yield Phase(part, group.network, group.size, group.links)
        return
    shared = {"all-gather": kind, "reduce-scatter": "all-reduce", "all-reduce": kind}
    if near > 1 and kind in shared:
        yield Phase(exchange._replace(kind=shared[kind]), "ICI", near, group.links)
        payload /= near
    yield Phase(exchange._replace(payload=payload), "DCN", slices)


def _in_steps(exchange: Exchange, steps: tuple[AxisSteps, ...]) -> Iterator[Exchange]:
    """Return the steps of a gather or scatter along one axis; others take one."""
    sizes: tuple[int, ...] = ()
    if not exchange.members and len(exchange.axes) == 1:
        for axis in steps:
            if axis.axis == exchange.axes[0]:
                of_kind = {"reduce-scatter": axis.scatter, "all-gather": axis.gather}
                sizes = of_kind.get(exchange.kind, ())
    for groups in nested(sizes):
        members = tuple(groups[0]) if groups else exchange.members
        exchange = exchange._replace(members=members)
        yield exchange
        exchange = exchange._replace(payload=exchange.payload / max(1, len(members)))


@functools.lru_cache(maxsize=128)
def _group(
    axes: tuple[str, ...], members: tuple[int, ...], mesh: Mesh
) -> tuple[Group, int]:
    """Return the group of an exchange, and how many slices it is in."""
    return group_along(axes, mesh, members), num_parts(mesh, axes, members)
