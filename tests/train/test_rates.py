"""Rates are the vendor's figures for one device."""

import pytest

from train.chips import CHIPS
from train.groups import Group
from train.rates import stated_rates


def test_a_device_has_its_share_of_its_chip():
    rates, chip = stated_rates(CHIPS["tpu7x"]), CHIPS["tpu7x"]
    assert chip.hbm_bandwidth
    assert (rates.flops, rates.memory) == (2307e12 / 2, chip.hbm_bandwidth / 2)
    assert rates.send(Group(("fsdp",), 4, "ICI")) == 100e9
    assert rates.send(Group(("data",), 2, "DCN")) == 100e9 / 8 / 2


def test_a_gpu_uses_all_its_links():
    assert stated_rates(CHIPS["h100"]).send(Group(("fsdp",), 8, "NVLink")) == 450e9


def test_what_is_not_stated_is_named():
    with pytest.raises(ValueError, match="TPU v2 does not state hbm_bandwidth"):
        stated_rates(CHIPS["v2"])
    rates = stated_rates(CHIPS["v4"])
    with pytest.raises(ValueError, match="TPU v4 does not state dcn_bandwidth"):
        rates.send(Group(("data",), 2, "DCN"))
