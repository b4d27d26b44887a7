"""Which devices take part in a collective: axes of the mesh, and the network between.

The text of a program numbers devices by their place in `mesh.devices.flat`; that of one
slice of several (TPU), by their place among those of the slice.
"""

import re
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from train.hardware.interconnect import Group, group_at
from train.plan.compiled.hlo import Instruction

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


def group_of(instruction: Instruction, mesh: Mesh, dims: int | None = None) -> Group:
    """Read the groups of a collective.

    Args:
        instruction: the collective.
        mesh: of the devices.
        dims: of a TPU's torus that it uses at once; None: all that a group spans.

    Raises:
        ValueError: if they are written in a way that is not known.
    """
    pairs = instruction.find(r" source_target_pairs=\{(.*?\})\}")
    if pairs:
        ids = np.array(re.findall(r"\{(\d+),(\d+)\}", pairs), int)
    else:
        ids = replica_groups(instruction.attributes, mesh.devices.size)
    group = group_at(_on_mesh(ids, mesh), mesh, dims)
    if not pairs:
        return group
    axis_size = int(np.prod([mesh.shape[axis] for axis in group.axes], dtype=int))
    return replace(group, size=axis_size)


def slices_group(send: Instruction, mesh: Mesh) -> Group:
    """Read between which slices the hosts transfer, and along which axes those lie."""
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    axes = tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if np.any(slices != np.take(slices, [0], axis))
    )
    target = send.find(r'_xla_megascale_target="\{([\d,:]+)\}')
    if not target:  # pairs of devices: each slice sends to one
        return Group(axes, len(np.unique(slices)), "DCN")
    wanted = set[int]()
    for part in target.split(","):
        first, _, last = part.partition(":")
        wanted |= {*range(int(first) - 1, int(last or first))}  # they count from 1
    return Group(axes, len(wanted), "DCN")


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Give the device numbers as [groups, size].

    Raises:
        ValueError: if they are written in a way that is not known.
    """
    listed = re.search(r" replica_groups=(.*?)(?:, \w+=|$)", attributes)
    text = listed[1] if listed else ""
    named = re.search(r" replica_groups=(mesh\[.*?\].*?) \{(.*?)\}", attributes)
    if named:
        return _named_groups(named[1], named[2])
    if text.startswith("{{"):
        nested = re.search(r" replica_groups=\{(\{.*?\})\}", attributes)
        assert nested
        groups = re.findall(r"\{([\d,]+)\}", nested[1])
        return np.array([[int(n) for n in group.split(",")] for group in groups])
    if text.startswith("["):
        return _iota(text)
    if text in ("", "{}"):
        return np.arange(num_devices)[None]
    raise ValueError(f"replica groups {text!r} cannot be read")


def _iota(text: str) -> np.ndarray:
    """Read `[4,2]<=[2,4]T(1,0)`: 0, 1, ... as [2,4], transposed, as [4,2]."""
    match = _IOTA.match(text)
    assert match, text
    shape, source, order = (
        [int(n) for n in part.split(",")] if part else None for part in match.groups()
    )
    assert shape
    ids = np.arange(np.prod(shape)).reshape(source or shape)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _named_groups(mesh: str, axes: str) -> np.ndarray:
    """Read `mesh['a'=2,'b'=4] {'b'}`, perhaps with device ids, perhaps `'b':(1)2`.

    Source: Mesh::ToString and AxisRef::ToString in openxla/xla, xla/hlo/ir.
    """
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    names = list(sizes)
    listed = re.search(r"device_ids=\((.*)\)", mesh)
    ids = np.arange(np.prod([*sizes.values()]))
    if listed and listed[1].startswith("["):
        ids = _iota(listed[1])  # its dims are not those of the mesh
    elif listed:
        ids = np.array([int(n) for n in re.findall(r"\d+", listed[1])])
    ids = ids.reshape([*sizes.values()])
    chosen = list[int]()
    for name, major, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        position = names.index(name)
        if size:  # a part of an axis: cut it into three
            parts = (int(major), int(size), sizes[name] // int(major) // int(size))
            ids = ids.reshape(*ids.shape[:position], *parts, *ids.shape[position + 1 :])
            names[position : position + 1] = [f"{name}<", name, f"{name}>"]
            sizes[name] = int(size)
            position += 1
        chosen.append(names.index(name))
    ids = np.moveaxis(ids, chosen, range(-len(chosen), 0))
    return ids.reshape(-1, int(np.prod(ids.shape[-len(chosen) :])))


def _on_mesh(ids: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Turn the numbers in a program into places in `mesh.devices.flat`."""
    devices = list(mesh.devices.flat)
    slices = [getattr(device, "slice_index", 0) for device in devices]
    if devices[0].platform != "tpu" or len(set(slices)) == 1:
        return ids
    first = [index for index, number in enumerate(slices) if number == slices[0]]
    return np.array(first)[ids]
