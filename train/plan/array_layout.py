"""Show which chip holds which slice of an array, on the grid of the machine.

A panel is one plane of chips: a two-dimensional TPU slice, a plane of a
three-dimensional TPU slice, or a node of GPUs. Most panels differ only in the mesh
position of their first device. So plan.html stores each distinct pattern of relative
positions once, and its script computes which device holds which slice.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from model.axes import mesh_axes
from model.params import named
from train.console import print_table
from train.errors import ConfigError, Mistake
from train.mesh import Device
from train.program import Program
from train.sharding import bytes_per_device
from train.units import format_bytes

_CHIPS_DRAWN = 320  # chips that the page draws at a time
_NODE_COLUMNS = 8


class _Position(NamedTuple):
    """The position at which the page draws a device.

    `column` includes the core, so that the devices of a chip are adjacent.
    """

    panel: tuple[int, ...]
    row: int
    column: tuple[int, int]


def _position(device: Device) -> _Position:
    if device.platform != "tpu":
        row, column = divmod(device.id, _NODE_COLUMNS)
        return _Position((device.process_index,), row, (column, 0))
    x, y, *depth = device.coords
    panel = getattr(device, "slice_index", 0), *depth
    return _Position(panel, row=y, column=(x, device.core_on_chip))


def layout_data(program: Program) -> dict[str, Any]:
    """Return the data with which the page's script draws the shardings of arrays.

    Returns:
        axes: [name, size] of each mesh axis, the slowest network first.
        unit: the kind of group that a panel is part of: `slice`, `node` or `process`.
        planes: the number of panels in a unit.
        columns: the number of columns of a panel.
        drawn: the number of panels that are drawn at a time.
        patterns: `places` (indices in `mesh.devices.flat`) and `hosts` of a panel's
            devices, each minus the panel's minimum.
        panels: [pattern, first place, first host] of each panel.
        arrays: name, type, shape, bytes on a device, and spec, which lists for each dim
            the indices of its mesh axes.
    """
    mesh = program.mesh
    devices = sorted(enumerate(mesh.devices.flat), key=lambda item: _position(item[1]))
    panels = defaultdict[tuple[int, ...], list[tuple[int, Device]]](list)
    for index, device in devices:
        panels[_position(device).panel].append((index, device))
    patterns, drawn_panels = list[dict[str, list[int]]](), list[list[int]]()
    for panel in panels.values():
        places = [index for index, _ in panel]
        hosts = [device.process_index for _, device in panel]
        pattern = {
            "places": [index - min(places) for index in places],
            "hosts": [host - min(hosts) for host in hosts],
        }
        if pattern not in patterns:
            patterns.append(pattern)
        drawn_panels.append([patterns.index(pattern), min(places), min(hosts)])
    platform, panel = mesh.devices.flat[0].platform, next(iter(panels.values()))
    arrays = [*named(program.state.params), *named({"batch": program.batch._asdict()})]
    return {
        "axes": [[name, size] for name, size in mesh.shape.items()],
        "unit": {"tpu": "slice", "cpu": "process"}.get(platform, "node"),
        "planes": len({key[1:] for key in panels}),
        "columns": len({_position(device).column for _, device in panel}),
        "drawn": max(1, _CHIPS_DRAWN // len(panel)),
        "patterns": patterns,
        "panels": drawn_panels,
        "arrays": [_array_data(name, leaf) for name, leaf in arrays],
    }


def _array_data(name: str, leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    names, rank = sharding.mesh.axis_names, len(leaf.shape)
    spec = [*sharding.spec, *[None] * rank][:rank]
    return {
        "name": name,
        "type": str(leaf.dtype),
        "shape": leaf.shape,
        "bytes": format_bytes(bytes_per_device(leaf)),
        "spec": [[names.index(axis) for axis in mesh_axes(entry)] for entry in spec],
    }


def print_slices(array: dict[str, Any]) -> None:
    """Print the result of `array_slices`, without mesh axes that have one position."""
    held = array["held"]
    axes = [a for a in held[0]["position"] if any(x["position"][a] for x in held)]
    rows = [
        [
            shard["device"],
            " ".join(f"{axis}={shard['position'][axis]}" for axis in axes),
            f"[{', '.join(f'{start}:{stop}' for start, stop in shard['slice'])}]",
        ]
        for shard in held
    ]
    shape = "x".join(map(str, array["shape"]))
    title = f"{array['name']} {shape} {array['dtype']}, {tuple(array['spec'])}"
    print_table(rows, ["device", "mesh position", "holds"], title)


def array_slices(program: Program, name: str) -> dict[str, Any]:
    """Return which device holds which slice of a parameter, as plain values.

    Returns:
        name, shape, dtype and spec of the parameter, and `held`, which lists for each
        device its name, its mesh position, and the start and stop in each dim.

    Raises:
        ConfigError: if no parameter has this name. The error lists all names.
    """
    arrays, mesh = dict(named(program.state.params)), program.mesh
    if name not in arrays:
        rule = "must be the name of a parameter, one of: " + ", ".join(arrays)
        raise ConfigError([Mistake("plan.array", name, rule)])
    leaf = arrays[name]
    positions = {device: index for index, device in np.ndenumerate(mesh.devices)}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": list(leaf.sharding.spec),
        "held": [
            {
                "device": str(device),
                "position": dict(zip(mesh.axis_names, positions[device], strict=True)),
                "slice": [
                    dim_slice.indices(size)[:2]
                    for dim_slice, size in zip(index, leaf.shape, strict=True)
                ],
            }
            for device, index in indices.items()
        ],
    }
