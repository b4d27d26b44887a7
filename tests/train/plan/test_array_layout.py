"""The page's data and its script say of each device what jax says."""

import json
import math

import pytest

from model.params import named
from tests.train.pages import run_node
from train.errors import ConfigError
from train.hardware.targets import parse_target
from train.plan.array_layout import array_slices, layout_data, print_slices
from train.plan.page import TEMPLATE

MACHINES = [
    ("v5e-16x3", "mesh=fsdp", "mesh.data=3", "mesh.dcn.data=3"),
    ("v5p-128", "mesh=fsdp_tensor", "mesh.tensor=2"),
    ("tpu7x-16", "mesh=fsdp"),
    ("h100-4x2", "mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2"),
]
LARGE = (
    *("model.attention=xla", "model.embed_dim=256", "model.num_heads=8"),
    "data.batch_size=768",
)


@pytest.fixture
def laid_out(configure, lay_out):
    """Lay a small program out on stand-ins: (target, *overrides) -> Program."""
    return lambda name, *more: lay_out(configure(*LARGE, *more), name)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine[0])
def test_the_page_shows_what_each_device_holds_and_where_it_is(laid_out, machine):
    program, target = laid_out(*machine), parse_target(machine[0])
    data, template = layout_data(program), TEMPLATE.read_text()
    start = template.index("const {layout}")
    end = template.index("function layoutSection")
    script = f"""const data = {{layout: {json.dumps(data)}}};{template[start:end]}
      console.log(JSON.stringify(layout.panels.map(panel => panel.places.map((at, i) =>
        [at, panel.hosts[i], layout.arrays.map(array => held(array, at))]))))"""
    panels, columns = json.loads(run_node(script)), data["columns"]
    drawn = [device for panel in panels for device in panel]
    devices = list(program.mesh.devices.flat)
    assert len({index for index, _, _ in drawn}) == len(drawn) >= min(256, len(devices))
    leaves = dict(named(program.state.params))
    leaves |= dict(named({"batch": program.batch._asdict()}))
    indices = {n: x.sharding.devices_indices_map(x.shape) for n, x in leaves.items()}
    for index, host, parts in drawn:
        assert host == devices[index].process_index
        for array, part in zip(data["arrays"], parts, strict=True):
            leaf = leaves[array["name"]]
            dims = zip(indices[array["name"]][devices[index]], leaf.shape, strict=True)
            assert part["slice"] == [list(dim.indices(size)[:2]) for dim, size in dims]
            shard = leaf.sharding.shard_shape(leaf.shape)
            assert part["count"] == math.prod(leaf.shape) // math.prod(shard)
    for i in range(0, len(drawn), columns):
        row = [devices[index] for index, _, _ in drawn[i : i + columns]]
        assert len({device.slice_index for device in row}) == 1
        if target.platform == "tpu":
            assert len({device.coords[1:] for device in row}) == 1
            assert [d.coords[0] for d in row] == sorted(d.coords[0] for d in row)
            assert columns == target.topology[0] * target.chip.devices
        else:
            assert len({device.process_index for device in row}) == 1


def test_an_arrays_slices_are_printed_and_returned(programs, capsys):
    program = programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)
    name, devices = "layers.0.0.mlp.down.weight", program.mesh.devices.flat
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
        holds = ", ".join(f"{start}:{stop}" for start, stop in shard["slice"])
        assert line.startswith(str(device))
        assert line.endswith(f"  [{holds}]")
    with pytest.raises(ConfigError, match=r"layers\.0\.0\.mlp\.up\.weight") as error:
        array_slices(program, "layers.0.0.mlp.up")
    assert error.value.mistakes[0].key == "plan.array"
