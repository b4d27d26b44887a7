"""Say how arrays are sharded, and which device holds which slice of one of them."""

from typing import Any

import jax
import numpy as np

from data.errors import Mistake
from model.params import named
from train.console import print_table
from train.core.layout import bytes_per_device
from train.core.program import Program
from train.errors import ConfigError
from train.units import format_bytes


def layout_data(program: Program) -> dict[str, Any]:
    """Return the mesh axes, and the sharding of each parameter and of the batch."""
    arrays = [*named(program.state.params), *named({"batch": program.batch._asdict()})]
    return {
        "axes": dict(program.mesh.shape),
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
    arrays = dict(named(program.state.params))
    mesh = program.mesh
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
