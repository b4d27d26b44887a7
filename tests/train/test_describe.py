"""What is printed of the layout is the layout."""

import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from model.params import named
from train.describe import (
    array_slices,
    bytes_per_device,
    describe,
    describe_array,
    describe_data,
)
from train.errors import ConfigError
from train.units import format_flops

CUBE = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.fixture(scope="module")
def program(programs):
    return programs(*CUBE, devices=8)


def test_bytes_per_device_are_those_of_a_shard(program):
    for _, leaf in named(program.state):
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        assert bytes_per_device(leaf) == shard.size * leaf.dtype.itemsize


def test_the_table_shows_each_parameter_with_its_spec(program, capsys):
    describe(program)
    out = capsys.readouterr().out
    for name, leaf in named(program.state.params):
        (line,) = [x for x in out.splitlines() if x.startswith(name + " ")]
        assert "x".join(map(str, leaf.shape)) in line
        assert str(tuple(leaf.sharding.spec)) in line
    (up,) = [x for x in out.splitlines() if x.startswith("layers.mlp.up.weight")]
    assert "layers embed mlp" in up
    assert "(None, 'fsdp', 'tensor')" in up
    assert up.endswith(" 8.00 KiB")  # 2 x 32 x 128 float32 on 4 parts
    assert "mesh        data 2 x fsdp 2 x tensor 2" in out
    assert "devices     8 x cpu" in out
    assert "8 rows x 32 = 256 tokens" in out
    assert f" {format_flops(program.flops_per_step)} of the model" in out


def test_the_sums_are_right(program, capsys):
    describe(program)
    out = capsys.readouterr().out
    params = sum(x.size for x in jax.tree.leaves(program.state.params))
    assert f"parameters  {params:,}\n" in out
    # AdamW: parameter and two moments, all but the heads' norms on 4 devices.
    state = re.search(r"state       ([\d.]+) KiB a device", out)
    assert state is not None
    assert float(state[1]) == pytest.approx(3 * 4 * params / 4 / 1024, rel=0.02)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 384 * 32  # no embedding, no norms
    assert program.flops_per_step == 256 * (6 * matrices + 12 * 2 * 32 * 32)


def test_an_arrays_slices_are_where_its_shards_are(program, capsys):
    name = "layers.mlp.down.weight"
    describe_array(program, name)
    out = capsys.readouterr().out
    leaf = dict(named(program.state.params))[name]
    array = jax.device_put(jax.numpy.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    assert f"{name} 2x128x32 float32, (None, 'tensor', 'fsdp')" in out
    for shard in array.addressable_shards:
        (line,) = [x for x in out.splitlines() if x.startswith(f"{shard.device} ")]
        spans = [s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)]
        assert line.endswith("[" + ", ".join(f"{a}:{b}" for a, b in spans) + "]")
        ((data, fsdp, _, _, tensor),) = zip(
            *(program.mesh.devices == shard.device).nonzero(), strict=True
        )
        assert f"data={data} fsdp={fsdp} tensor={tensor}" in line
        assert spans[1:] == [
            (64 * tensor, 64 * tensor + 64),
            (16 * fsdp, 16 * fsdp + 16),
        ]


def test_the_same_is_there_for_programs(program):
    found = json.loads(json.dumps(array_slices(program, "layers.mlp.down.weight")))
    leaf = dict(named(program.state.params))[found["name"]]
    assert (tuple(found["shape"]), found["dtype"]) == (leaf.shape, "float32")
    assert found["spec"] == [None, "tensor", "fsdp"]
    slices = {held["device"]: held["slice"] for held in found["held"]}
    at = {held["device"]: tuple(held["position"].values()) for held in found["held"]}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        spans = [s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True)]
        assert slices[str(device)] == [list(span) for span in spans]
        assert program.mesh.devices[at[str(device)]] == device


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (0.0, "never used"),
        (1e-5, "used less than 0.01 times"),
        (10.004, "used 10.00 times"),
    ],
)
def test_how_often_a_source_is_used_can_be_told_from_never(epochs, said, capsys):
    order: Any = SimpleNamespace(
        names=["web"], rows=[range(9)], epochs=lambda num_steps: {"web": epochs}
    )
    describe_data(order, 10)
    assert capsys.readouterr().out == f"data        web: 9 rows, {said}\n"


def test_an_unknown_array_lists_those_there_are(program):
    with pytest.raises(ConfigError) as error:
        describe_array(program, "layers.mlp.up")
    (mistake,) = error.value.mistakes
    assert mistake.key == "plan.array"
    assert "layers.mlp.up.weight" in mistake.rule
