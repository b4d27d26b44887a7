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

from train.hardware.interconnect import Group, group_along, num_parts
from train.plan.estimated.collectives import Exchange


class Phase(NamedTuple):
    """A collective over one network, among `size` devices."""

    exchange: Exchange
    network: str
    size: int


def phases(exchange: Exchange, mesh: Mesh) -> Iterator[Phase]:
    """Return the phases of an exchange, in no order."""
    group, slices = _group(exchange.axes, exchange.members, mesh)
    kind, payload, near = exchange.kind, exchange.payload, group.size // slices
    if group.network != "DCN":
        yield Phase(exchange, group.network, group.size)
        return
    shared = {"all-gather": kind, "reduce-scatter": "all-reduce", "all-reduce": kind}
    if near > 1 and kind in shared:
        yield Phase(exchange._replace(kind=shared[kind]), "ICI", near)
        payload /= near
    yield Phase(exchange._replace(payload=payload), "DCN", slices)


@functools.lru_cache(maxsize=128)
def _group(
    axes: tuple[str, ...], members: tuple[int, ...], mesh: Mesh
) -> tuple[Group, int]:
    """Return the group of an exchange, and how many slices it is in."""
    return group_along(axes, mesh, members), num_parts(mesh, axes, members)
