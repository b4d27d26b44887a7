"""Show which chip holds which slice of an array, on the grid of the machine.

A panel is one plane of chips: a two-dimensional TPU slice, a plane of a
three-dimensional TPU slice, or a node of GPUs.
"""

from collections import defaultdict
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from model.params import named
from train.console import print_table
from train.core.mesh import Device
from train.core.program import Program
from train.core.sharding import bytes_per_device
from train.errors import ConfigError, Mistake
from train.units import format_bytes

# The page draws as many devices at most, but at least one panel.
_DEVICES_DRAWN = 320


class _Position(NamedTuple):
    """The position at which the page draws a device.

    `column` includes the core, so that the devices of a chip are adjacent.
    """

    panel: tuple[int, ...]
    row: int
    column: tuple[int, int]


def _position(device: Device) -> _Position:
    if device.platform != "tpu":
        return _Position((device.process_index,), row=0, column=(device.id, 0))
    x, y, *depth = device.coords
    panel = getattr(device, "slice_index", 0), *depth
    return _Position(panel, row=y, column=(x, device.core_on_chip))


def layout_data(program: Program) -> dict[str, Any]:
    """Return the data with which the page's script draws the shardings of arrays.

    Mesh axes are in order of their networks, the slowest first. The places of a panel's
    devices are indices in `mesh.devices.flat`.
    """
    mesh = program.mesh
    devices = sorted(enumerate(mesh.devices.flat), key=lambda item: _position(item[1]))
    panels = defaultdict[tuple[int, ...], list[tuple[int, Device]]](list)
    for index, device in devices:
        panels[_position(device).panel].append((index, device))
    first_panel = next(iter(panels.values()))
    num_drawn = max(1, _DEVICES_DRAWN // len(first_panel))
    unit = {"tpu": "slice", "cpu": "process"}.get(devices[0][1].platform, "node")
    arrays = [*named(program.state.params), *named({"batch": program.batch._asdict()})]
    return {
        "axes": dict(mesh.shape),
        "columns": len({_position(device).column for _, device in first_panel}),
        "panels": [
            {
                "title": f"{unit} {', z '.join(map(str, panel))}",
                "places": [index for index, _ in members],
                "hosts": [device.process_index for _, device in members],
            }
            for panel, members in islice(panels.items(), num_drawn)
        ],
        "arrays": [_array_data(name, leaf) for name, leaf in arrays],
    }


def _array_data(name: str, leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    sharding: Any = leaf.sharding
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": list(sharding.spec),
        "bytes": format_bytes(bytes_per_device(leaf)),
    }


def print_slices(array: dict[str, Any]) -> None:
    """Print the result of `array_slices`."""
    rows = [
        [
            shard["device"],
            " ".join(f"{axis}={index}" for axis, index in shard["position"].items()),
            f"[{', '.join(f'{start}:{stop}' for start, stop in shard['slice'])}]",
        ]
        for shard in array["held"]
    ]
    shape = "x".join(map(str, array["shape"]))
    title = f"{array['name']} {shape} {array['dtype']}, {tuple(array['spec'])}"
    print_table(rows, ["device", "mesh position", "holds"], title)


def array_slices(program: Program, name: str) -> dict[str, Any]:
    """Return which device holds which slice of a parameter, as plain values.

    `held` lists for each device its name, its position along the mesh axes with several
    devices, and the start and stop in each dim. Raises ConfigError, with the names of
    all parameters, if there is none of this name.
    """
    arrays, mesh = dict(named(program.state.params)), program.mesh
    if name not in arrays:
        rule = "must be the name of a parameter, one of: " + ", ".join(arrays)
        raise ConfigError([Mistake("plan.array", name, rule)])
    leaf = arrays[name]
    slices = leaf.sharding.devices_indices_map(leaf.shape)
    shards = []
    for position, device in np.ndenumerate(mesh.devices):
        dims = zip(slices[device], leaf.shape, strict=True)
        axes = zip(mesh.shape.items(), position, strict=True)
        shard = {
            "device": str(device),
            "position": {axis: index for (axis, size), index in axes if size > 1},
            "slice": [dim_slice.indices(size)[:2] for dim_slice, size in dims],
        }
        shards.append(shard)
    return _array_data(name, leaf) | {"held": shards}
