"""The texts of a step are written next to the plan, and summarised in a few lines."""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.program import module_option
from train.plan.__main__ import plan_mistakes
from train.plan.compiled.inspection import Buffer, InPlace, Inspection
from train.plan.config import PlanConfig
from train.plan.show import print_inspection, sentences

INSPECTION = Inspection(
    in_place=InPlace(["a", "b"], []),
    kernels={"splash_mha_fwd": 32},
    buffers=[Buffer(3 * 2**30, "bf16[32,8]", "layers forward mlp.up (fusion)")],
)


def test_an_inspection_is_summarised(capsys):
    print_inspection(INSPECTION)
    printed = capsys.readouterr().out
    for text in (
        *("2 of 2 arrays of the state are updated in place", "splash_mha_fwd 32 x"),
        *("3.00 GiB", "mlp.up (fusion)"),
    ):
        assert text in printed
    incomplete = dataclasses.replace(
        INSPECTION, in_place=InPlace(["a"], ["b", "c", "d", "e"])
    )
    text = dict(sentences(incomplete))["in place"]
    assert text.startswith("1 of 5 arrays")
    assert "but not, for example, b, c, d" in text


def test_a_search_refuses_to_show_a_step():
    for search in (True, False):
        mistakes = plan_mistakes(PlanConfig(search=search, show=True, target="v5e-8"))
        assert ("show" in {mistake.key for mistake in mistakes}) is search


@pytest.mark.parametrize("compiles", [True, False])
def test_only_a_compiled_step_can_be_shown(compiles):
    config = PlanConfig(show=True, compile=compiles, target="v5e-8")
    assert ("show" in {m.key for m in plan_mistakes(config)}) is not compiles


@pytest.mark.slow
def test_the_command_shows_the_step_of_this_machine(tmp_path):
    command = [sys.executable, *module_option("train.plan"), "show=true"]
    command.append(f"output={tmp_path}")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "35 of 35 arrays of the state are updated in place" in result.stdout
    inspection = json.loads((tmp_path / "plan.json").read_text())["inspection"]
    assert inspection["in_place"]["others"] == []
    assert len(inspection["buffers"]) == 10
    assert "dot_general[" in (tmp_path / "step.jaxpr").read_text()
    assert "stablehlo.dot_general" in (tmp_path / "step.stablehlo").read_text()
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
