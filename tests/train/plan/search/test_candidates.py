"""Layouts are listed, and become overrides that give the same layout."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.plan.search.conftest import LARGE, budget
from train.cli.command import compose
from train.config import MESH_AXES
from train.plan.search.candidates import Layout, layout_of, layouts
from train.plan.search.weigh import Weighing

SIZES = st.sampled_from([1, 2, 4, 6, 8, 256]), st.integers(1, 5)


@given(*SIZES, st.sampled_from([0, 8]), st.sampled_from([4096, 2**15]))
def test_meshes_are_distinct_and_use_all_devices(slice_size, slices, experts, length):
    meshes = layouts(slice_size * slices, slices, experts, length)
    assert len(set(meshes)) == len(meshes)
    for mesh in meshes:
        sizes = (getattr(mesh, axis) for axis in MESH_AXES)
        assert math.prod(sizes) == slice_size * slices
        assert mesh.expert <= max(experts, 1)
        assert mesh.context <= max(length // 8192, 1)
        assert mesh.dcn_pipeline * mesh.dcn_data * mesh.dcn_fsdp == slices
        assert mesh.pipeline in (1, slices)
        assert mesh.data % mesh.dcn_data == mesh.fsdp % mesh.dcn_fsdp == 0
    shapes = {(m.fsdp, m.tensor, m.expert) for m in meshes if m.dcn_fsdp == 1}
    expected = {(slice_size, 1, 1), (1, 1, 1)}
    if experts and slice_size % 4 == 0:
        expected |= {(slice_size // 4, 1, 4), (1, 2, 2)}
    assert expected <= shapes


@pytest.mark.parametrize(
    ("mesh", "overrides", "steps"),
    [
        (Layout(2, 4), "", {1, 2, 4}),  # 12 rows a device
        (Layout(2, 2, pipeline=2), "", {1, 2, 4}),
        # A pipeline splits the rows of a device into four microbatches of its own.
        (Layout(2, 2, pipeline=2), "train.pipeline_microbatches=8", {1}),
    ],
)
def test_each_microbatch_has_whole_rows(mesh, overrides, steps):
    config = compose(["data.batch_size=96", *overrides.split()])
    choices = Weighing(config, [], budget(LARGE), lambda: None).variants(mesh)
    assert {layout.accumulation_steps for layout in choices} == steps
    assert (choices[0].remat, choices[0].accumulation_steps) == ("none", 1)
    assert (choices[-1].remat, choices[-1].accumulation_steps) == ("full", max(steps))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(6, 4, dcn_data=3, remat="dots", accumulation_steps=4),
        Layout(1, 4, remat="full", pipeline=2, dcn_pipeline=2),
        Layout(1, 4, 2, expert=4, dcn_tensor=2, remat="[attention,mlp_up]"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "mesh=planned",
        "mesh=auto mesh.context=4 mesh.expert=2 mesh.dcn.context=4",
        "mesh=ddp mesh.dcn.data=2 mesh.pipeline=2 mesh.dcn.tensor=2",
    ],
)
def test_overrides_give_the_layout_to_any_command(layout, command):
    command = ["model=mixtral_8x7b", *command.split()]
    overrides = layout.overrides(compose(command).mesh).split()
    devices = math.prod(getattr(layout, axis) for axis in MESH_AXES)
    by_overrides = compose([*command, *overrides])
    applied = layout.applied(compose(["mesh=planned"]))
    for config in (by_overrides, applied):
        found = layout_of(config.mesh, config.train, num_devices=devices)
        assert found == layout
