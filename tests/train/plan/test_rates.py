"""Rates of a device: those that a prediction reckons with."""

import pytest

from train.hardware.achievable import achievable
from train.hardware.chips import CHIPS
from train.hardware.devices import fake_devices
from train.hardware.interconnect import Group, NotStated
from train.hardware.targets import parse_target
from train.plan.rates import rates_of
from train.program import make_program


@pytest.fixture
def mesh(configure, monkeypatch):
    """(target, *overrides) -> its mesh, on stand-ins."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def mesh(target, *overrides):
        config = configure("model.attention=xla", "mesh=fsdp", *overrides)
        return make_program(config, fake_devices(parse_target(target))).mesh

    return mesh


def test_they_are_of_one_device_and_what_programs_get(mesh):
    chip, part = CHIPS["tpu7x"], achievable("tpu")
    rates = rates_of(mesh("tpu7x-8"), chip)  # two devices a chip
    assert rates.flops == pytest.approx(part.products * 2307e12 / 2)
    assert rates.memory == pytest.approx(part.memory * 7380e9 / 2)


def test_all_links_of_a_gpu_and_its_own_card(mesh):
    part = achievable("cuda")
    here = mesh("h100-4x2", "mesh.data=2", "mesh.fsdp=4", "mesh.dcn.data=2")
    send = rates_of(here, CHIPS["h100"]).send
    assert send(Group(("fsdp",), 4, "NVLink")) == pytest.approx(part.links * 450e9)
    assert send(Group(("data",), 2, "network")) == pytest.approx(part.network * 50e9)


def test_what_the_vendor_does_not_state_is_said(mesh):
    with pytest.raises(NotStated, match="v2: its vendor does not state hbm_bandwidth"):
        rates_of(mesh("v5e-4"), CHIPS["v2"])
    send = rates_of(mesh("v4-8"), CHIPS["v4"]).send
    with pytest.raises(NotStated, match="dcn_bandwidth"):
        send(Group(("data",), 2, "DCN"))
