"""The ways to lay a step out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.cli.command import compose
from train.plan.candidates import Layout, layout_of, layouts, variants
from train.plan.recomputing import WAYS, typed


@given(st.sampled_from([1, 2, 4, 6, 8, 256]), st.integers(1, 5))
def test_each_mesh_has_all_devices_and_no_two_are_the_same(inside, parts):
    found = layouts(inside * parts, parts)
    assert len(set(found)) == len(found)
    for mesh in found:
        size = mesh.pipeline * mesh.data * mesh.fsdp * mesh.tensor
        assert size == inside * parts
        assert mesh.dcn_pipeline * mesh.dcn_data * mesh.dcn_fsdp == parts
        assert mesh.pipeline in (1, parts)  # stages are slices
        assert mesh.data % mesh.dcn_data == mesh.fsdp % mesh.dcn_fsdp == 0
    shapes = {(mesh.fsdp, mesh.tensor) for mesh in found if mesh.dcn_fsdp == 1}
    assert {(inside, 1), (1, 1)} <= shapes


def test_microbatches_are_whole_rows_of_each_device():
    mesh = Layout(2, 4, 1, 1, 1, "none", 1)
    found = [*variants(mesh, 96)]  # 12 rows a device
    assert {one.accumulation_steps for one in found} == {1, 2, 4}
    assert {one.remat for one in found} == set(map(typed, WAYS))
    assert len(found) == 3 * len(WAYS)
    stages = Layout(2, 2, 1, 1, 1, "none", 1, pipeline=2)
    assert {one.accumulation_steps for one in variants(stages, 96)} == {1, 2, 4}
    assert [*variants(mesh, 4)] == []  # less than a row


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 4, 2, 1, 1, "full", 4),
        Layout(6, 4, 1, 3, 1, "dots", 1),
        Layout(1, 8, 1, 1, 2, "none", 2),
        Layout(1, 4, 1, 1, 1, "full", 1, pipeline=2, dcn_pipeline=2),
        Layout(1, 8, 1, 1, 1, "[attention,mlp_up]", 1),
    ],
)
def test_what_is_to_be_typed_gives_the_layout(layout):
    config = compose(["mesh=auto", *layout.overrides.split()])
    sizes = layout.pipeline, layout.data, layout.fsdp, layout.tensor
    devices = math.prod(sizes)
    assert layout_of(config, devices) == layout
    assert layout_of(layout.applied(compose(["mesh=planned"])), devices) == layout


def test_what_is_left_to_the_plan_or_impossible_is_none():
    assert layout_of(compose(["mesh=planned"]), 8) is None
    assert layout_of(compose(["mesh=ddp", "mesh.tensor=3"]), 8) is None
