"""The page's data and its script say of each device what jax says."""

import json
import math

import pytest

from model.params import named
from tests.train.pages import run_node
from train.errors import ConfigError
from train.hardware.targets import parse_target
from train.plan.array_layout import (
    array_slices,
    arrays_of,
    describe_array,
    layout_data,
)
from train.plan.page import TEMPLATE

MACHINES = [
    ("v5e-256", "fsdp_tensor", "mesh.tensor=4"),
    ("v5e-16x3", "fsdp", "mesh.data=3", "mesh.dcn.data=3"),
    ("v5e-8", "fsdp"),
    ("v5p-128", "fsdp_tensor", "mesh.tensor=2"),
    ("tpu7x-16", "fsdp"),
    ("h100-8x4", "fsdp_tensor", "mesh.tensor=8"),
    ("h100-4x2", "fsdp", "mesh.data=2", "mesh.dcn.data=2"),
]
LARGE = ("model.embed_dim=256", "model.num_heads=8", "data.batch_size=768")


@pytest.fixture
def laid_out(configure, lay_out):
    """Lay a small program out on stand-ins: (target, mesh, *overrides) -> Program."""
    shape = ("model.attention=xla", *LARGE)
    return lambda name, mesh, *more: lay_out(
        configure(f"mesh={mesh}", *shape, *more), name
    )


def places(data) -> list[int]:
    """Unfold the places of all devices, panel by panel."""
    return [
        first + number * step + offset
        for pattern, first, step, _, _, count in data["runs"]
        for number in range(count)
        for offset in data["patterns"][pattern]["places"]
    ]


def slices(data, array, place) -> list[list[int]]:
    at = []
    for _, size in reversed(data["axes"]):
        at.insert(0, place % size)
        place //= size
    found = []
    for size, axes in zip(array["shape"], array["spec"], strict=True):
        part, parts = 0, 1
        for axis in axes:
            part = part * data["axes"][axis][1] + at[axis]
            parts *= data["axes"][axis][1]
        found.append([part * size // parts, (part + 1) * size // parts])
    return found


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine[0])
def test_every_chip_holds_what_jax_says(laid_out, machine):
    program = laid_out(*machine)
    data = json.loads(json.dumps(layout_data(program)))
    assert sorted(places(data)) == list(range(program.mesh.size))
    flat = list(program.mesh.devices.flat)
    for array in data["arrays"]:
        leaf = dict(arrays_of(program))[array["name"]]
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            spans = [
                list(s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True)
            ]
            assert slices(data, array, flat.index(device)) == spans


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine[0])
def test_chips_are_drawn_where_they_stand(laid_out, machine):
    program, target = laid_out(*machine), parse_target(machine[0])
    data, flat = layout_data(program), list(program.mesh.devices.flat)
    columns, drawn = data["columns"], [flat[place] for place in places(data)]
    rows = [drawn[i : i + columns] for i in range(0, len(drawn), columns)]
    for row in rows:
        assert len({device.slice_index for device in row}) == 1
        if target.platform == "tpu":
            assert len({device.coords[1:] for device in row}) == 1
            assert [d.coords[0] for d in row] == sorted(d.coords[0] for d in row)
            assert columns == target.topology[0] * target.chip.devices
        else:
            assert len({device.process_index for device in row}) == 1
    assert data["unit"] == ("slice" if target.platform == "tpu" else "node")
    deep = len(target.topology) > 2
    assert data["planes"] == (target.topology[2] if deep else 1)


def test_all_of_the_state_and_the_batch_is_there(laid_out):
    program = laid_out("v5e-8", "fsdp")
    names = {array["name"] for array in layout_data(program)["arrays"]}
    assert {"layers.mlp.up.weight", "batch.inputs", "step"} <= names
    assert not any(name.startswith("optimizer.mu") for name in names)


def test_199_slices_take_no_more_room_than_one(laid_out):
    def size(*machine: str) -> int:
        return len(json.dumps(layout_data(laid_out(*machine, "data.batch_size=50944"))))

    mesh = ("mesh.data=199", "mesh.dcn.data=199")
    whole = size("v5e-256x199", "fsdp", *mesh)
    assert whole < size("v5e-256", "fsdp") + 100 < 10_000


@pytest.mark.parametrize("machine", MACHINES[:2], ids=lambda machine: machine[0])
def test_the_page_computes_the_same(laid_out, machine):
    data, places = layout_data(laid_out(*machine)), [0, 7, 47]
    template = TEMPLATE.read_text()
    start, end = (template.index(f"function {n}") for n in ("coordinates", "titleOf"))
    script = f"""const layout = {json.dumps(data)};{template[start:end]}
      console.log(JSON.stringify(layout.arrays.map(array =>
        {places}.map(place => held(array, place)))))"""
    for array, parts in zip(data["arrays"], json.loads(run_node(script)), strict=True):
        sizes = [data["axes"][axis][1] for dim in array["spec"] for axis in dim]
        for place, part in zip(places, parts, strict=True):
            assert part["slice"] == slices(data, array, place)
            assert part["count"] == math.prod(sizes)
            assert 0 <= part["number"] < part["count"]


@pytest.fixture
def program(programs):
    return programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)


def test_an_arrays_slices_are_printed_and_returned(program, capsys):
    name = "layers.mlp.down.weight"
    array = json.loads(json.dumps(array_slices(program, name)))
    leaf = dict(named(program.state.params))[name]
    assert (tuple(array["shape"]), array["dtype"]) == (leaf.shape, "float32")
    assert array["spec"] == ["pipeline", "tensor", "fsdp"]
    shards = {shard["device"]: shard for shard in array["held"]}
    describe_array(program, name)
    printed = capsys.readouterr().out.splitlines()
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        spans = [s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True)]
        shard = shards[str(device)]
        assert shard["slice"] == [list(span) for span in spans]
        assert program.mesh.devices[tuple(shard["position"].values())] == device
        (line,) = [line for line in printed if line.startswith(f"{device} ")]
        assert line.endswith("[" + ", ".join(f"{a}:{b}" for a, b in spans) + "]")


def test_an_unknown_array_lists_those_there_are(program):
    with pytest.raises(ConfigError) as error:
        describe_array(program, "layers.mlp.up")
    (mistake,) = error.value.mistakes
    assert mistake.key == "plan.array"
    assert "layers.mlp.up.weight" in mistake.rule
