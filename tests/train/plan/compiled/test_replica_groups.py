"""The devices of a collective are read in every notation of XLA."""

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


def two_slices(axis):
    """Return a mesh of 2 x 4 devices, which an axis divides into two slices."""
    devices = np.empty((2, 4, 1), object)
    for index in np.ndindex(*devices.shape):
        slice_index = 2 * index[axis] // devices.shape[axis]
        devices[index] = SimpleNamespace(
            platform="tpu", device_kind="", slice_index=slice_index
        )
    return SimpleNamespace(axis_names=AXES, devices=devices)


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
def test_groups_are_read_in_every_notation(written, groups):
    attributes = f", replica_groups={written}, use_global_device_ids=true"
    assert replica_groups(attributes, 8).tolist() == groups


def test_an_unknown_notation_is_an_error():
    with pytest.raises(ValueError, match="cannot be read"):
        replica_groups(", replica_groups=mesh['a'=8] {'a':(1)2}, dimensions={0}", 8)


def test_a_program_of_a_slice_numbers_its_own_devices():
    """The first slice holds half of the devices along `fsdp`."""
    gather = in_one("  ROOT %c = f32[1] all-gather(), replica_groups={{0,1,2,3}}")
    group = group_of(parse(gather).entry.root, two_slices(axis=1))
    assert (group.axes, group.network) == (("data", "fsdp"), "ICI")


SEND = """  %a = bf16[8,128] parameter(0)
  %t = token[] after-all()
  ROOT %send = (bf16[8,128], u32[], token[]) send(%a, %t), channel_id=1, \
is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ONE_TO_ONE"}, backend_config={}"""


def test_hosts_send_from_one_slice_to_another():
    (permute,) = list_collectives(read_module(in_one(SEND)), two_slices(axis=0))
    assert permute.kind == "collective-permute"
    assert permute.group == Group(("data",), 2, "DCN")
    assert permute.payload == permute.sent == 2 * 8 * 128
