"""What a step may take of a device's memory."""

import pytest

from train.hardware.chips import CHIPS
from train.hardware.targets import parse_target
from train.plan.budget import memory_budget

GB = 2**30


def test_the_margin_is_of_all_memory_and_the_system_keeps_its_part():
    chip = parse_target("v5e-8").chip
    assert memory_budget(chip, 0.0).available == int(15.75 * GB)
    assert memory_budget(chip, 0.25).available == 12 * GB


def test_jax_gives_programs_a_fraction_of_a_gpu(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    chip = parse_target("h100-8").chip
    stated = memory_budget(chip, 0.05)
    assert stated.program == stated.total // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".92")
    assert memory_budget(chip, 0.0).program == int(0.92 * stated.total)


def test_what_a_real_card_has_counts_if_its_name_does_not_tell(monkeypatch):
    """An A100 has 80 GB or 40 GB. Drivers leave a little less of either."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.75")
    chip = parse_target("a100-8").chip
    stated = memory_budget(chip, 0.05)
    assert memory_budget(chip, 0.05, limit=int(0.99 * stated.program)) == stated
    half = memory_budget(chip, 0.05, limit=stated.program // 2)
    assert half.available == half.program == stated.program // 2
    assert half.total == pytest.approx(stated.total / 2)


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if c.hbm_bytes])
def test_a_program_has_no_more_than_a_device_holds(chip):
    room = memory_budget(chip, 0.0)
    assert 0 < room.available <= room.program <= room.total
