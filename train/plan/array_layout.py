"""Show which chip holds which slice of an array, on the grid of the machine.

A panel is one plane of chips: a two-dimensional TPU slice, a plane of a
three-dimensional TPU slice, or a node of GPUs. Most panels differ only in the mesh
position of their first device. So plan.html stores each distinct pattern of relative
positions once, and its script computes which device holds which slice.
"""

from collections.abc import Iterator
from typing import Any

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


def layout_data(program: Program) -> dict[str, Any]:
    """Return the data with which the page's script draws the shardings of arrays.

    Returns:
        axes: [name, size] of each mesh axis, the slowest network first.
        unit: the kind of group that a panel is part of: `slice`, `node` or `process`.
        planes: the number of panels in a unit.
        columns: the number of columns of a panel.
        drawn: the number of panels that are drawn at a time.
        patterns: `places` (positions in `mesh.devices.flat`) and `hosts` of the devices
            of a panel, each minus the panel's minimum.
        runs: sequences of panels with the same pattern, each as [pattern, first place,
            step, first host, step, number of panels].
        arrays: name, type, shape, bytes on a device, and spec, which lists for each dim
            the indices of its mesh axes.
    """
    mesh = program.mesh
    place_of = {device: position for position, device in enumerate(mesh.devices.flat)}
    panels = dict[tuple[int, ...], list[Device]]()
    for device in mesh.devices.flat:
        panels.setdefault(_panel_key(device), []).append(device)
    panel = next(iter(panels.values()))
    is_flat = not _on_grid(panel[0])
    columns = len(panel) if is_flat else len({_column(device) for device in panel})
    patterns, runs = list[dict[str, list[int]]](), list[list[int]]()
    for _, devices in sorted(panels.items()):
        devices = sorted(devices, key=lambda device: (_row(device), _column(device)))
        places = [place_of[device] for device in devices]
        hosts = [device.process_index for device in devices]
        first_place, first_host = min(places), min(hosts)
        pattern = {
            "places": [p - first_place for p in places],
            "hosts": [h - first_host for h in hosts],
        }
        if pattern not in patterns:
            patterns.append(pattern)
        _append_panel(runs, patterns.index(pattern), first_place, first_host)
    return {
        "axes": [[name, size] for name, size in mesh.shape.items()],
        "unit": {"tpu": "slice", "cpu": "process"}.get(panel[0].platform, "node"),
        "planes": len({key[1:] for key in panels}),
        "columns": min(columns, _NODE_COLUMNS) if is_flat else columns,
        "drawn": max(1, _CHIPS_DRAWN // len(panel)),
        "patterns": patterns,
        "runs": runs,
        "arrays": [_array_data(name, leaf) for name, leaf in arrays_of(program)],
    }


def _append_panel(runs: list[list[int]], pattern: int, place: int, host: int) -> None:
    """Extend the last run by a panel that continues it, or start a run."""
    if runs and runs[-1][0] == pattern:
        _, first_place, step, first_host, host_step, count = runs[-1]
        if count == 1:
            step, host_step = place - first_place, host - first_host
        next_panel = first_place + count * step, first_host + count * host_step
        if (place, host) == next_panel:
            runs[-1] = [pattern, first_place, step, first_host, host_step, count + 1]
            return
    runs.append([pattern, place, 0, host, 0, 1])


def arrays_of(program: Program) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """Yield the name and shape of each array of the state and batch, except moments."""
    params = list(named(program.state.params))
    yield from params
    for name, leaf in named(program.batch._asdict()):
        yield f"batch.{name}", leaf
    for name, leaf in named(program.state):
        is_moment = any(name.endswith(n) and leaf.shape == p.shape for n, p in params)
        if not is_moment:
            yield name, leaf


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


def _on_grid(device: Device) -> bool:
    return device.platform == "tpu"


def _panel_key(device: Device) -> tuple[int, ...]:
    if not _on_grid(device):
        return (device.process_index,)
    return getattr(device, "slice_index", 0), *device.coords[2:]


def _row(device: Device) -> int:
    return device.coords[1] if _on_grid(device) else 0


def _column(device: Device) -> tuple[int, int]:
    """Return a sort key for a row's devices; the devices of a chip are adjacent."""
    if _on_grid(device):
        return device.coords[0], device.core_on_chip
    return device.id, 0


def describe_array(program: Program, name: str) -> None:
    """Print which device holds which slice of a parameter.

    Raises:
        ConfigError: if there is no such parameter.
    """
    array, sizes = array_slices(program, name), program.mesh.shape
    rows = [
        [
            shard["device"],
            " ".join(f"{k}={v}" for k, v in shard["position"].items() if sizes[k] > 1),
            f"[{', '.join(f'{start}:{stop}' for start, stop in shard['slice'])}]",
        ]
        for shard in array["held"]
    ]
    shape = "x".join(map(str, array["shape"]))
    title = f"{name} {shape} {array['dtype']}, {tuple(array['spec'])}"
    print_table(rows, ["device", "mesh position", "holds"], title)


def array_slices(program: Program, name: str) -> dict[str, Any]:
    """Return which device holds which slice of a parameter, as plain values.

    Returns:
        name, shape, dtype and spec of the parameter, and `held`, which lists for each
        device its name, its mesh position, and the start and stop in each dim.

    Raises:
        ConfigError: if there is no such parameter.
    """
    leaf, mesh = find_array(program.state.params, name), program.mesh
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


def find_array(params: Any, name: str) -> Any:
    """Return the parameter with a given name.

    Raises:
        ConfigError: if no parameter has the name. The error lists all names.
    """
    arrays = dict(named(params))
    if name not in arrays:
        rule = "must be the name of a parameter, one of: " + ", ".join(arrays)
        raise ConfigError([Mistake("plan.array", name, rule)])
    return arrays[name]
