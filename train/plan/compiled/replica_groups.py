"""Find the mesh axes and the network of a collective's devices.

The text of a program numbers devices by their position in `mesh.devices.flat`. With
several TPU slices, it numbers only the devices of the first slice, in the same order.
"""

import math
import re
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from train.hardware.interconnect import Group, group_at
from train.plan.compiled.hlo import Instruction

_GROUPS = r" (?:replica_groups|source_target_pairs)=(.*?)(?:, \w+=[^(]|$)"
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


def group_of(instruction: Instruction, mesh: Mesh, dims: int | None = None) -> Group:
    """Return the group of devices that a collective joins.

    A permute joins pairs of devices. `dims` are the dims of a TPU's torus used at once;
    None means all of them.

    Raises:
        ValueError: if the notation of the groups is unknown.
    """
    ids = replica_groups(instruction.attributes, mesh.devices.size)
    if mesh.devices.flat[0].platform == "tpu":
        slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
        ids = np.flatnonzero(np.equal(slices, slices[0]))[ids]
    return group_at(ids, mesh, dims)


def slices_group(mesh: Mesh) -> Group:
    """Return the group of all slices, between which the hosts transfer data."""
    slices = [device.slice_index for device in mesh.devices.flat]
    _, first_devices = np.unique(slices, return_index=True)
    return replace(group_at(first_devices[None], mesh), links=0)


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Return the device numbers of the groups or pairs as an array [groups, size]."""
    match = re.search(_GROUPS, attributes)
    text = match[1] if match else "{}"
    if named_groups := re.fullmatch(r"mesh(\[.*?\].*?) \{([\w',]*)\}", text):
        return _read_named_groups(named_groups[1], named_groups[2])
    if text.startswith("{{"):
        groups = re.findall(r"\{([\d,]+)\}", text)
        return np.array([[int(n) for n in group.split(",")] for group in groups])
    if text.startswith("["):
        return _read_iota(text)
    if text == "{}":
        return np.arange(num_devices)[None]
    raise ValueError(f"replica groups {text!r} cannot be read")


def _read_iota(text: str) -> np.ndarray:
    """Read `[4,2]<=[2,4]T(1,0)`: an iota of shape [2,4], transposed, then reshaped."""
    match = _IOTA.match(text)
    assert match, text
    shape, source, order = (
        [int(n) for n in part.split(",")] if part else None for part in match.groups()
    )
    assert shape
    ids = np.arange(np.prod(shape)).reshape(source or shape)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _read_named_groups(mesh: str, axes: str) -> np.ndarray:
    """Read `['a'=2,'b'=4] {'b'}`, optionally with the numbers of the devices.

    Source: Mesh::ToString in openxla/xla, xla/hlo/ir.
    """
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids := re.search(r"device_ids=\((\[.*)\)", mesh):
        ids = _read_iota(device_ids[1])  # Its shape may differ from the mesh's.
    elif device_ids := re.search(r"device_ids=\((.*)\)", mesh):
        ids = np.array(re.findall(r"\d+", device_ids[1]), int)
    group_axes = re.findall(r"'(\w+)'", axes)
    group_dims = [list(sizes).index(axis) for axis in group_axes]
    ids = ids.reshape([*sizes.values()])
    ids = np.moveaxis(ids, group_dims, range(-len(group_dims), 0))
    return ids.reshape(-1, math.prod(sizes[axis] for axis in group_axes))
