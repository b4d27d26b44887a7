"""The bandwidth of mesh axes follows from the links and rings of the devices."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh

from tests.train.machines import machine
from train.hardware.chips import CHIPS
from train.hardware.interconnect import (
    NotStated,
    bandwidth,
    group_along,
    group_at,
    hops,
    num_slices,
    num_slices_along,
    rings,
)

# These achievable fractions are those of train/hardware/achievable.py.
ICI = 0.74
NVLINK = 0.80
FAR = 0.80
GB = 1e9


@pytest.mark.parametrize(
    ("name", "overrides", "axes", "links"),
    [
        # Both dims of 16 are rings: all four links.
        ("v5e-256", ("mesh=fsdp",), ["fsdp"], 4),
        # One ring each.
        ("v5e-256", ("mesh=fsdp_tensor", "mesh.tensor=16"), ["tensor"], 2),
        ("v5e-256", ("mesh=fsdp_tensor", "mesh.tensor=16"), ["fsdp", "tensor"], 4),
        # A part of a ring is a line.
        ("v5e-256", ("mesh=fsdp_tensor", "mesh.tensor=4"), ["tensor"], 1),
        # Below 16 nothing goes around.
        ("v5e-16", ("mesh=fsdp",), ["fsdp"], 2),
        # A cube of 4 x 4 x 4: three rings.
        ("v5p-128", ("mesh=fsdp",), ["fsdp"], 6),
        ("v5p-128", ("mesh=fsdp_tensor", "mesh.tensor=4"), ["tensor"], 2),
        ("v5p-128", ("mesh=fsdp_tensor", "mesh.tensor=4"), ["fsdp"], 4),
        # Less than a cube: three lines.
        ("v5p-16", ("mesh=fsdp",), ["fsdp"], 3),
    ],
)
def test_ici_is_the_links_that_a_group_can_use(composed, name, overrides, axes, links):
    at = machine(composed, name, overrides)
    found = bandwidth(at.mesh, axes, "ICI", at.chip)
    assert at.chip.link_bandwidth is not None
    assert found == pytest.approx(ICI * links * at.chip.link_bandwidth)


@pytest.mark.parametrize(
    ("family", "shape", "wrap"),
    [
        ("v4", (2, 4, 4), (False, False, False)),
        ("v5p", (4, 4, 4), (True, True, True)),
        ("tpu7x", (4, 8, 12), (True, True, True)),
        ("v5e", (8, 16, 1), (False, True, False)),
        ("v6e", (16, 16, 1), (True, True, False)),
    ],
)
def test_links_go_around_in_whole_cubes_and_along_sixteen_chips(family, shape, wrap):
    assert rings(shape, CHIPS[family]) == wrap


@pytest.mark.parametrize(
    ("members", "dims", "links"),
    [
        ([*range(64)], None, 6),
        ([*range(0, 64, 4)], None, 4),  # a plane
        ([*range(0, 64, 4)], 1, 2),  # one ring through a plane
        ([0, 1, 2, 3], None, 2),  # a line that goes around
        ([0, 1], None, 1),
        ([*range(0, 64, 8)], 1, 2),
    ],
)
def test_a_group_has_the_links_that_its_own_members_span(
    composed, members, dims, links
):
    """The fsdp axis covers 4 x 4 x 4 chips and runs along their last dim first."""
    at = machine(composed, "v5p-128", ["mesh=fsdp"])
    group = group_at(np.array([members]), at.mesh, dims)
    assert group.links == links
    found = bandwidth(at.mesh, group.axes, "ICI", at.chip, group.links)
    assert found == pytest.approx(ICI * links * 100 * GB)


def test_devices_of_a_chip_share_its_links_unless_they_are_of_one_group(composed):
    """tpu7x: two devices a chip, 64 chips as 4 x 4 x 4."""
    at = machine(composed, "tpu7x-128", ["mesh=fsdp"])
    whole = bandwidth(at.mesh, ["fsdp"], "ICI", at.chip)
    assert whole == pytest.approx(ICI * 6 * 100 * GB)
    at = machine(composed, "tpu7x-128", ["mesh=fsdp_tensor", "mesh.tensor=2"])
    half = bandwidth(at.mesh, ["fsdp"], "ICI", at.chip)
    assert half == pytest.approx(whole / 2)


def test_a_ring_through_nodes_has_the_cards_of_its_members_there(composed):
    copies = machine(composed, "h100-8x4", ["mesh=fsdp", "mesh.data=4"])
    alone = bandwidth(copies.mesh, ["data"], "network", copies.chip)
    assert alone == pytest.approx(FAR * 50 * GB)
    shards = machine(composed, "h100-8x4", ["mesh=fsdp"])
    all_cards = bandwidth(shards.mesh, ["fsdp"], "network", shards.chip)
    assert all_cards == pytest.approx(FAR * 8 * 50 * GB)
    inside = bandwidth(copies.mesh, ["fsdp"], "NVLink", copies.chip)
    assert inside == pytest.approx(NVLINK * 450 * GB)


def test_a_node_is_one_whether_each_of_its_gpus_has_a_process(composed):
    at = machine(composed, "h100-8x2", ["mesh=fsdp", "mesh.data=2"])

    def like(change):
        return Mesh(np.vectorize(change)(at.mesh.devices), at.mesh.axis_names)

    each = like(lambda gpu: dataclasses.replace(gpu, process_index=gpu.id))
    # For absent GPUs, XLA in jax 0.10.2 reports the same slice for all of them.
    described = like(lambda gpu: dataclasses.replace(gpu, slice_index=0))
    for mesh in (at.mesh, each, described):
        assert group_along(["fsdp"], mesh).network == "NVLink"
        assert group_along(["data"], mesh).network == "network"
        assert num_slices(mesh.devices.flat) == num_slices_along(mesh, ["data"]) == 2
        both = bandwidth(mesh, ["data", "fsdp"], "network", at.chip)
        assert both == pytest.approx(FAR * 8 * 50 * GB)


def test_what_a_vendor_does_not_say_is_not_made_up(composed):
    at = machine(composed, "v4-8x2", ["mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2"])
    with pytest.raises(NotStated, match=r"TPU v4.*dcn_bandwidth"):
        bandwidth(at.mesh, ["data"], "DCN", at.chip)
    silent = dataclasses.replace(at.chip, link_bandwidth=None)
    with pytest.raises(NotStated, match="link_bandwidth"):
        bandwidth(at.mesh, ["fsdp"], "ICI", silent)


def test_bytes_of_an_all_to_all_pass_a_quarter_of_each_ring(composed):
    at = machine(composed, "v5e-256", ["mesh=fsdp"])
    assert hops(at.mesh, ["fsdp"], "ICI") == 16 / 4 + 16 / 4
    assert hops(at.mesh, ["fsdp"], "NVLink") == 1
