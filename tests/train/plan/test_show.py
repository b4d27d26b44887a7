"""Texts beside the plan, and what matters in them, in a few lines."""

import dataclasses
import json
import subprocess
import sys

import pytest

from train.plan.__main__ import plan_mistakes
from train.plan.compiled.inspection import Buffer, InPlace, Inspection
from train.plan.config import PlanConfig
from train.plan.show import print_inspection, sentences

FOUND = Inspection(
    in_place=InPlace(["a", "b"], []),
    kernels={"splash_mha_fwd": 32},
    buffers=[Buffer(3 * 2**30, "bf16[32,8]", "layers forward mlp.up (fusion)")],
)


def test_an_inspection_is_summarised(capsys):
    print_inspection(FOUND)
    printed = capsys.readouterr().out
    for text in (
        *("2 of 2 arrays of the state are updated in place", "splash_mha_fwd 32 x"),
        *("3.00 GiB", "mlp.up (fusion)"),
    ):
        assert text in printed
    lost = dataclasses.replace(FOUND, in_place=InPlace(["a"], ["b", "c", "d", "e"]))
    text = dict(sentences(lost))["in place"]
    assert text.startswith("1 of 5 arrays")
    assert "but not, for example, b, c, d" in text


def test_a_search_shows_nothing():
    for search in (True, False):
        found = plan_mistakes(PlanConfig(search=search, show=True, target="v5e-8"))
        assert ("show" in {mistake.key for mistake in found}) is search


@pytest.mark.slow
def test_this_machines_step_is_shown_through_the_door(tmp_path):
    command = [sys.executable, "-m", "train.plan", "show=true", f"output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "35 of 35 arrays of the state are updated in place" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())["inspection"]
    assert found["in_place"]["others"] == []
    assert len(found["buffers"]) == 10
    assert "dot_general[" in (tmp_path / "step.jaxpr").read_text()
    assert "stablehlo.dot_general" in (tmp_path / "step.stablehlo").read_text()
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
