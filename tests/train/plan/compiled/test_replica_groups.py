"""Which devices a collective joins, in every way that XLA writes it."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.train.compiled import in_one
from train.hardware.interconnect import Group
from train.plan.compiled.collectives import list_collectives
from train.plan.compiled.hlo import parse
from train.plan.compiled.replica_groups import group_of, replica_groups
from train.plan.compiled.trip_counts import read_module

AXES = ("data", "fsdp", "tensor")


def a_mesh(sizes, platform="tpu", slices=1, processes=1, slow_axis=0):
    """A mesh whose devices lie in slices (or processes) along an axis."""
    devices = np.empty(sizes, object)
    for place in np.ndindex(*sizes):
        part = place[slow_axis] / sizes[slow_axis]
        devices[place] = SimpleNamespace(
            platform=platform,
            device_kind="",
            slice_index=int(part * slices),
            process_index=int(part * processes),
        )
    return SimpleNamespace(
        axis_names=AXES,
        shape=dict(zip(AXES, sizes, strict=True)),
        devices=devices,
    )


def group(attribute: str, mesh) -> Group:
    text = in_one(f"  ROOT %c = f32[1] all-reduce(%x), channel_id=1, {attribute}")
    return group_of(parse(text).entry.root, mesh)


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ("{}", [[*range(8)]]),
    ],
)
def test_groups(written, groups):
    attributes = f", replica_groups={written}, use_global_device_ids=true"
    assert replica_groups(attributes, 8).tolist() == groups


def test_an_unknown_way_of_writing_is_an_error():
    with pytest.raises(ValueError, match="cannot be read"):
        replica_groups(", replica_groups=mesh['a'=8] {'a':(1)2}, dimensions={0}", 8)


@pytest.mark.parametrize(
    ("attribute", "axes", "size"),
    [
        ("replica_groups=[4,2]<=[4,2]T(1,0)", ("fsdp",), 2),
        ("replica_groups=[2,4]<=[8]", ("fsdp", "tensor"), 4),
        ("source_target_pairs={{0,2},{2,0},{5,7},{7,5}}", ("fsdp",), 2),
        ("replica_groups={}", AXES, 8),
    ],
)
def test_axes_are_those_along_which_members_differ(attribute, axes, size):
    found = group(f"{attribute}, use_global_device_ids=true", a_mesh((2, 2, 2)))
    assert found == Group(axes, size, "ICI")


@pytest.mark.parametrize("slow_axis", [0, 1])
def test_a_program_of_a_slice_numbers_its_own_devices(slow_axis):
    """0 to 3 of the first slice; which axis leaves it is not among them."""
    mesh = a_mesh((2, 4, 1), slices=2, slow_axis=slow_axis)
    found = group("replica_groups={{0,1,2,3}}, x=1", mesh)
    axes = ("fsdp",) if slow_axis == 0 else ("data", "fsdp")
    assert (found.axes, found.network) == (axes, "ICI")


ONE_WAY = '{"phase_rings":[{"ring_type":"ICI_RING_TYPE_UNIDIR_CW"}]},'


@pytest.mark.parametrize(
    ("algorithm", "links"),
    [
        ("", 6),  # not stated: all three rings of the slice, in both directions
        ('"emitter":"1DAllGatherOnMajorDim"', 2),
        ('"strategy":"StrategyND{colors:3 phases:3}"', 6),
        ('"strategy":"UniDirectionNDRingStrategy{colors:6 phases:3}"', 6),
        ('"strategy":"UniDirectionRingStrategy{colors:2 phases:1}"', 2),
        (f'"color_strategies":[{6 * ONE_WAY}]', 6),
    ],
)
def test_a_collective_uses_the_links_that_its_algorithm_states(algorithm, links):
    mesh = a_mesh((1, 64, 1))
    for place, device in enumerate(mesh.devices.flat):
        device.device_kind = "TPU v5"
        device.coords = np.unravel_index(place, (4, 4, 4))
    line = f"  ROOT %c = f32[1] all-reduce(%a), backend_config={{{algorithm}}}"
    text = in_one("  %a = f32[1] parameter(0)\n" + line)
    (found,) = list_collectives(read_module(text), mesh)
    assert found.group.links == links


SEND = """  %a = bf16[8,128] parameter(0)
  %t = token[] after-all()
  ROOT %send = (bf16[8,128], u32[], token[]) send(%a, %t), channel_id=1, \
is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_host_transfer_rendezvous="ppermute.6_0",\
_xla_megascale_target={{100000->200000},{100001->200001}},\
_xla_megascale_transfer_type="ONE_TO_ONE"}, backend_config={}"""


def test_hosts_send_from_one_slice_to_another():
    (permute,) = list_collectives(
        read_module(in_one(SEND)), a_mesh((2, 4, 1), slices=2)
    )
    assert permute.kind == "collective-permute"
    assert permute.group == Group(("data",), 2, "DCN")
    assert permute.payload == permute.sent == 2 * 8 * 128
