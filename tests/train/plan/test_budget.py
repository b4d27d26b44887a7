"""A budget is the part of a device's memory that a step may use."""

import pytest

from train.hardware.chips import CHIPS
from train.hardware.targets import parse_target
from train.plan.budget import memory_budget

GB = 2**30


def test_the_margin_is_a_part_of_all_memory_and_includes_the_systems_part():
    chip = parse_target("v5e-8").chip
    assert memory_budget(chip, 0.0).available == int(15.75 * GB)
    assert memory_budget(chip, 0.25).available == 12 * GB


def test_jax_gives_programs_a_fraction_of_a_gpu(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    chip = parse_target("h100-8").chip
    budget = memory_budget(chip, 0.05)
    assert budget.program == budget.total // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".92")
    assert memory_budget(chip, 0.0).program == int(0.92 * budget.total)


def test_the_memory_of_a_real_card_counts_if_its_name_is_ambiguous(monkeypatch):
    """An A100 has 80 GB or 40 GB, and drivers leave a little less."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.75")
    chip = parse_target("a100-8").chip
    budget = memory_budget(chip, 0.05)
    assert memory_budget(chip, 0.05, limit=int(0.99 * budget.program)) == budget
    half = memory_budget(chip, 0.05, limit=budget.program // 2)
    assert half.available == half.program == budget.program // 2
    assert half.total == pytest.approx(budget.total / 2)


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if c.hbm_bytes])
def test_a_program_has_no_more_than_a_device_holds(chip):
    budget = memory_budget(chip, 0.0)
    assert 0 < budget.available <= budget.program <= budget.total
