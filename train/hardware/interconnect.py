"""Compute the bandwidth of devices along mesh axes.

TPU: the chips of a slice form a grid, and links join neighbours along every dim. A dim
is a ring if a link also joins the last chip to the first. A group of devices uses the
dims along which its members differ. If the group fills a ring of such a dim, each chip
sends over two links, one in either direction. Otherwise each chip sends over one link,
because data must travel from end to end. A collective over several dims uses all their
links at once, unless XLA chooses one ring through all members, which uses two links of
each chip. Devices of one chip share its links, unless they are in the same group.

GPU: within a node every GPU reaches every other over all its NVLinks. A ring through
several nodes enters each node over the network cards of all members in the node.

Sources: jax-ml.github.io/scaling-book, "How to Think About TPUs" (links; rings of 2D
slices: dims of 16) and "Sharded Matrices and How to Multiply Them" (times of
collectives); docs.cloud.google.com/tpu/docs/v4 and /v5p (rings of 3D slices: whole
cubes of 4 x 4 x 4). Twisted tori, an option of some larger slices, are not modelled.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from train.hardware.chips import Chip, chip_of
from train.resolve.mesh import Device

_RING_SIZE_2D = 16
_RING_MULTIPLE_3D = 4  # All dims of a slice with rings are multiples of this.

# The networks inside and between the domains that `_domain` returns.
_NETWORKS = {
    "tpu": ("ICI", "DCN"),
    "cuda": ("NVLink", "network"),
    "gpu": ("NVLink", "network"),
    "cpu": ("memory", "network"),
}


class NotStated(ValueError):
    """The vendor does not state a figure that is needed."""


@dataclass(frozen=True)
class Group:
    """The devices that a collective joins."""

    axes: tuple[str, ...]  # mesh axes along which a group's members differ
    size: int
    network: str  # the slowest network that a group crosses
    links: int = 0  # links of a chip that a group uses in a TPU slice; 0 if unknown


def group_along(
    axes: Sequence[str],
    mesh: Mesh,
    members: Sequence[int] = (),
    dims: int | None = None,
) -> Group:
    """Return the group of devices that differ only in their position along some axes.

    `members` selects the positions of a smaller group in this group; () selects all.
    `dims` has the same meaning as in `num_links`.
    """
    numbers = [mesh.axis_names.index(axis) for axis in axes]
    positions = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    positions = np.moveaxis(positions, numbers, range(-len(numbers), 0))
    size = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    positions = positions.reshape(-1, size)
    return group_at(positions[:, members] if members else positions, mesh, dims)


def group_at(positions: np.ndarray, mesh: Mesh, dims: int | None = None) -> Group:
    """Return the `Group` that describes several groups of devices of the same size.

    `positions` are positions in `mesh.devices.flat`, as an array [groups, size]. `dims`
    has the same meaning as in `num_links`.
    """
    coordinates = np.unravel_index(positions, mesh.devices.shape)
    axes = tuple(
        name
        for name, coordinate in zip(mesh.axis_names, coordinates, strict=True)
        if np.any(coordinate != coordinate[:, :1])
    )
    devices = mesh.devices.flat
    groups = [[devices[i] for i in group] for group in positions]
    crosses_domains = any(num_slices(group) > 1 for group in groups)
    network = _NETWORKS[devices[0].platform][crosses_domains]
    return Group(axes, positions.shape[1], network, _links_of(groups[0], mesh, dims))


def _links_of(members: Sequence[Device], mesh: Mesh, dims: int | None) -> int:
    """Return `num_links` of a group in a slice of TPUs, or 0 if links are unknown."""
    chip = chip_of(members[0].device_kind)
    if members[0].platform != "tpu" or chip is None or not chip.links:
        return 0
    local_members = _in_slice_of(members[0], members)
    return num_links(local_members, slice_of(mesh, members[0]), chip, dims)


def bandwidth(
    mesh: Mesh, axes: Sequence[str], network: str, chip: Chip, links: int = 0
) -> float:
    """Return the bytes/s that a device can send to its group along mesh axes.

    Args:
        mesh: a mesh of real devices, fake devices or stand-ins (devices.py).
        axes: the axes along which the members of a group differ.
        network: the slowest network that a group crosses.
        chip: the chip of each device.
        links: the number of links of a TPU over which the group sends. 0: count the
            links for all devices along the axes.

    Raises:
        NotStated: if the chip's vendor does not state the bandwidth of the network.
    """
    members = members_along(mesh, axes)
    achievable = chip.achievable
    local_members = _in_slice_of(members[0], members)
    if network == "DCN":
        return achievable.network * stated(chip, "dcn_bandwidth") / chip.devices
    per_link = stated(chip, "link_bandwidth")
    if network == "ICI":
        links = links or num_links(local_members, slice_of(mesh, members[0]), chip)
        # Several groups may use the links of one chip at the same time.
        on_chip = len(local_members) / len({_coords(m) for m in local_members})
        num_groups = max(1.0, chip.devices / on_chip)
        return achievable.links * per_link * links / num_groups
    inside_node = achievable.links * per_link * stated(chip, "links")
    if network == "NVLink":
        return inside_node
    per_card = stated(chip, "dcn_bandwidth")
    return min(inside_node, achievable.network * len(local_members) * per_card)


def num_slices_along(
    mesh: Mesh, axes: Sequence[str], members: Sequence[int] = ()
) -> int:
    """Count the slices or nodes that a group of `group_along` spans."""
    devices = members_along(mesh, axes)
    return num_slices([devices[member] for member in members] or devices)


def num_slices(devices: Iterable[Device]) -> int:
    """Count the slices of TPUs, or the nodes of GPUs, that hold the devices."""
    return len(set(map(_domain, devices)))


def hops(mesh: Mesh, axes: Sequence[str], network: str) -> float:
    """Return the mean number of links that a byte of an all-to-all passes."""
    if network != "ICI":
        return 1.0
    sizes = extents(members_along(mesh, axes))
    return max(1.0, sum(size / 4 for size in sizes if size > 1))


def rings(shape: Sequence[int], chip: Chip) -> tuple[bool, ...]:
    """Return whether the links along each dim form a ring.

    `shape` is the number of chips along each dim of a slice of TPUs.
    """
    if chip.links == 4:
        return tuple(size == _RING_SIZE_2D for size in shape)
    return (all(size % _RING_MULTIPLE_3D == 0 for size in shape),) * len(shape)


def num_links(
    members: Sequence[Device],
    slice_: Sequence[Device],
    chip: Chip,
    dims: int | None = None,
) -> int:
    """Count the links of a chip over which a group in a slice of TPUs sends.

    A collective along several dims at once sends equal parts along each, so that the
    dim with the fewest links sets the pace.

    `members` are the devices of the group, and `slice_` all devices of their slice.
    The collective uses `dims` dims of the grid at once. None: all dims along which the
    group extends.
    """
    slice_sizes = extents(slice_)
    sizes = extents(members)
    dims_of_group = zip(sizes, slice_sizes, rings(slice_sizes, chip), strict=True)
    links_by_dim = [
        2 if is_ring and size == slice_size else 1
        for size, slice_size, is_ring in dims_of_group
        if size > 1
    ]
    if not links_by_dim:
        return 1
    if dims == 1 and len(links_by_dim) > 1:
        # One ring passes through all chips of a box, even if no dim is a ring.
        return 2
    num_dims = len(links_by_dim)
    return min(dims or num_dims, num_dims) * min(links_by_dim)


def slice_of(mesh: Mesh, device: Device) -> list[Device]:
    """Return all devices of a mesh that are in the slice or node of `device`."""
    return _in_slice_of(device, mesh.devices.flat)


def _in_slice_of(device: Device, devices: Iterable[Device]) -> list[Device]:
    return [other for other in devices if _domain(other) == _domain(device)]


def stated(chip: Chip, field: str) -> float:
    """Return a figure of a chip.

    Raises:
        NotStated: if the chip's vendor does not state the figure.
    """
    value = getattr(chip, field)
    if value is None or math.isnan(value):
        raise NotStated(f"{chip.kind}: its vendor does not state {field}")
    return value


def members_along(mesh: Mesh, axes: Sequence[str]) -> list[Device]:
    """Return the group along some axes to which the mesh's first device belongs."""
    index = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return list(np.atleast_1d(mesh.devices[index]).flat)


def extents(devices: Sequence[Device]) -> list[int]:
    """Count the different coordinates along each dim of the grid of chips."""
    by_dim = zip(*map(_coords, devices), strict=True)
    return [len(set(coordinates)) for coordinates in by_dim]


def _coords(device: Device) -> tuple[int, ...]:
    return tuple(device.coords)


def _domain(device: Device) -> tuple[int, ...]:
    """Return the id of a device's slice or GPU node, inside which the network is fast.

    A node may have a process for each GPU, so process ids do not identify nodes. JAX
    gives the processes of one host the same slice index. The coordinates of fake GPUs
    begin with the index of the node.
    Source: BuildGlobalTopology in openxla/xla, xla/pjrt/distributed/topology_util.cc.
    """
    if device.platform == "tpu":
        return (getattr(device, "slice_index", 0),)
    if device.platform == "cpu":
        return (device.process_index,)
    slice_index = getattr(device, "slice_index", device.process_index)
    return slice_index, *getattr(device, "coords", ())[:-2]
