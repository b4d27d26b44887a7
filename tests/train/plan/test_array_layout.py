"""Every device holds the slice of an array that is printed for it."""

import json

import pytest

from model.params import named
from train.errors import ConfigError
from train.plan.array_layout import array_slices, print_slices


def test_an_arrays_slices_are_printed_and_returned(programs, capsys):
    program = programs(["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], devices=8)
    name = "layers.0.0.mlp.down.weight"
    devices = program.mesh.devices.flat
    array = json.loads(json.dumps(array_slices(program, name)))
    leaf = dict(named(program.state.params))[name]
    assert (tuple(array["shape"]), array["dtype"]) == (leaf.shape, "float32")
    assert array["spec"] == ["pipeline", "tensor", "fsdp"]
    print_slices(array)
    _, _, _, *lines = capsys.readouterr().out.splitlines()
    slices = leaf.sharding.devices_indices_map(leaf.shape)
    assert array["held"][-1]["position"] == {"data": 1, "fsdp": 1, "tensor": 1}
    for device, shard, line in zip(devices, array["held"], lines, strict=True):
        dims = zip(slices[device], leaf.shape, strict=True)
        assert shard["slice"] == [list(dim.indices(size)[:2]) for dim, size in dims]
        bounds = ", ".join(f"{start}:{stop}" for start, stop in shard["slice"])
        assert line.startswith(str(device))
        assert line.endswith(f"  [{bounds}]")
    with pytest.raises(ConfigError, match=r"layers\.0\.0\.mlp\.up\.weight") as error:
        array_slices(program, "layers.0.0.mlp.up")
    assert error.value.mistakes[0].key == "plan.array"
