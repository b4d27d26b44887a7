"""The ways to lay a step out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.choices import Mlp
from model.config import ModelConfig
from train.cli.command import compose
from train.config import MESH_AXES
from train.plan.recomputing import POLICIES, format_policy
from train.plan.search.candidates import Layout, layout_of, layouts, variants


@given(
    st.sampled_from([1, 2, 4, 6, 8, 256]),
    st.integers(1, 5),
    st.sampled_from([0, 8]),
    st.sampled_from([4096, 2**15]),
)
def test_each_mesh_has_all_devices_and_no_two_are_the_same(
    inside, parts, experts, length
):
    found = layouts(inside * parts, parts, experts, length)
    assert len(set(found)) == len(found)
    for mesh in found:
        size = math.prod(getattr(mesh, axis) for axis in MESH_AXES)
        assert size == inside * parts
        assert mesh.expert <= max(experts, 1)
        assert mesh.context <= max(length // 8192, 1)
        assert mesh.dcn_pipeline * mesh.dcn_data * mesh.dcn_fsdp == parts
        assert mesh.pipeline in (1, parts)  # stages are slices
        assert mesh.data % mesh.dcn_data == mesh.fsdp % mesh.dcn_fsdp == 0
    shapes = {(m.fsdp, m.tensor, m.expert) for m in found if m.dcn_fsdp == 1}
    assert {(inside, 1, 1), (1, 1, 1)} <= shapes
    if experts and inside % 4 == 0:
        assert {(inside // 4, 1, 4), (1, 2, 2)} <= shapes
    if length > 8192 and inside % 4 == 0:  # the longest part that devices share
        assert 4 in {m.context for m in found}


def test_microbatches_are_whole_rows_of_each_device():
    mesh = Layout(2, 4, 1, 1, 1, "none", 1)
    found = variants(mesh, 96, ModelConfig())  # 12 rows a device
    assert {one.accumulation_steps for one in found} == {1, 2, 4}
    assert {one.remat for one in found} == set(map(format_policy, POLICIES))
    assert len(found) == 3 * len(POLICIES)
    assert found[0] == mesh
    assert (found[-1].remat, found[-1].accumulation_steps) == ("full", 4)
    for axis in ("pipeline", "expert"):
        cut = Layout(2, 2, 1, 1, 1, "none", 1, **{axis: 2})
        steps = {one.accumulation_steps for one in variants(cut, 96, ModelConfig())}
        assert steps == {1, 2, 4}
    assert variants(mesh, 4, ModelConfig()) == []  # less than a row
    piped = variants(mesh, 96, ModelConfig(), passes=4)  # cut once more
    assert {one.accumulation_steps for one in piped} == {1}


def test_where_no_layer_has_an_mlp_none_is_kept():
    mesh, moe = Layout(2, 4, 1, 1, 1, "none", 1), ModelConfig(mlp=Mlp.moe)
    for model in (replace(moe, shared_experts=1), replace(moe, dense_layers=1)):
        assert {one.remat for one in variants(mesh, 8, model)} == set(
            map(format_policy, POLICIES)
        )
    assert not any("mlp" in one.remat for one in variants(mesh, 8, moe))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 4, 2, 1, 1, "full", 4),
        Layout(6, 4, 1, 3, 1, "dots", 1),
        Layout(1, 8, 1, 1, 2, "none", 2),
        Layout(1, 4, 1, 1, 1, "full", 1, pipeline=2, dcn_pipeline=2),
        Layout(1, 8, 1, 1, 1, "[attention,mlp_up]", 1),
        Layout(1, 4, 2, 1, 1, "full", 1, expert=4),
        Layout(1, 4, 2, 1, 1, "full", 1, dcn_tensor=2),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["mesh=auto"],
        ["mesh=planned"],
        ["mesh=auto", "mesh.context=4", "mesh.expert=2", "mesh.dcn.context=4"],
        ["mesh=ddp", "mesh.dcn.data=2", "mesh.pipeline=2", "mesh.dcn.tensor=2"],
    ],
)
def test_what_is_to_be_typed_gives_the_layout(layout, command):
    """Behind a command that has sizes of its own, too."""
    command = ["model=mixtral_8x7b", *command]
    typed = layout.overrides(compose(command)).split()
    devices = math.prod(getattr(layout, axis) for axis in MESH_AXES)
    assert layout_of(compose([*command, *typed]), devices) == layout
    assert layout_of(layout.applied(compose(["mesh=planned"])), devices) == layout


def test_sizes_that_are_one_anyway_are_not_typed():
    layout = Layout(1, 8, 1, 1, 1, "full", 2)
    typed = "mesh.data=1 mesh.fsdp=8 mesh.tensor=1 train.remat=full "
    typed += "train.accumulation_steps=2"
    assert layout.overrides(compose(["mesh=fsdp"])) == typed


def test_what_is_left_to_the_plan_or_impossible_is_none():
    assert layout_of(compose(["mesh=planned"]), 8) is None
    assert layout_of(compose(["mesh=ddp", "mesh.tensor=3"]), 8) is None
