"""Speeds of published runs are predicted from the estimates of their steps."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published_rows import TABLES, read_rows
from tests.train.machines import machine
from train.plan.estimated.step import estimate_step
from train.plan.roofline import predict
from train.resolve.program import make_program

BASE = ("optimizer=adamw", "tracker=none")
ROOT = Path(published.__file__).parents[1]
FIGURES = ROOT / "benchmarks/results/2026-11-22_published.json"
TPU_ROWS = read_rows(TABLES["tpu"])
LLAMA_ROWS = read_rows(TABLES["llama"])
GPU_ROWS = read_rows(TABLES["gpu"])
B200_ROWS = read_rows(TABLES["b200"])


def compare_estimate(composed, row):
    """Return the comparison of a row with the estimate of its step."""
    *overrides, target = row.overrides
    setup = machine(composed, target.removeprefix("target="), overrides, base=BASE)
    program = make_program(setup.config, list(setup.mesh.devices.flat))
    chip = published.chip_of(row, setup.chip)
    estimate = published.Found(estimate_step(program), program, chip)
    return published.compare(row, estimate)


@pytest.mark.parametrize(
    "name", ["MPT 7b, 4,096 tokens, h100-8", "MPT 3b, 4,096 tokens, a100-8"]
)
def test_a_public_run_is_within_its_predicted_range(composed, name):
    """No constant was fitted to these runs."""
    (row,) = [row for row in GPU_ROWS if row.name == name]
    results = [row for row in json.loads(FIGURES.read_text()) if row["name"] == name]
    (result,) = [row for row in results if row["how"] == "estimated"]
    assert row.use == result["use"] == "judged by"
    *overrides, target = row.overrides
    setup = machine(composed, target.removeprefix("target="), overrides, base=())
    cost = published.cost_of(result["cost"] | {"outside_layers": []})
    data = setup.config.data
    chip = published.chip_of(row, setup.chip)
    tokens = data.batch_size * data.sequence_length
    predicted = predict(cost, setup.config.model, data, mesh=setup.mesh, chip=chip)
    step = predicted.step_s
    took = result["published"]["step_s"]
    assert step.low <= took <= step.high
    assert step.middle == pytest.approx(took, rel=0.2)
    assert took * row.tokens * setup.mesh.size == pytest.approx(tokens)


@pytest.mark.parametrize("target", ["v5p-512", "v6e-256"])
def test_public_runs_of_experts_are_within_20_percent_of_the_estimate(composed, target):
    """No constant was fitted to these runs."""
    (row,) = [row for row in TPU_ROWS if row.name.endswith(f"Mixtral 8x7B, {target}")]
    assert row.use == "judged by"
    assert abs(compare_estimate(composed, row)["error"]) < 0.2


def test_a_chip_with_the_constants_of_another_is_summed_up_separately(composed, capsys):
    (hopper,) = [row for row in GPU_ROWS if row.name == "MPT 3b, 512 tokens, h100-8"]
    (blackwell,) = B200_ROWS
    published.report([compare_estimate(composed, row) for row in (hopper, blackwell)])
    summary = capsys.readouterr().out
    assert "\nGPU judged by: 1 of 1 in range" in summary
    assert "\nB200 judged by: " in summary


@pytest.mark.slow
@pytest.mark.parametrize("row", LLAMA_ROWS, ids=lambda row: row.name)
def test_a_row_of_llama_can_be_planned(composed, row):
    assert compare_estimate(composed, row)["step_s"]["low"] > 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"source": None}, "has no source"),
        ({"speed": 1}, "has the unknown fields speed"),
        ({"tokens": None}, "must have one speed"),
        ({"chip": "h200"}, "has the chip 'h200'"),
    ],
)
def test_an_invalid_row_is_refused_by_its_name(tmp_path, change, problem):
    values = json.loads(TABLES["b200"].read_text())
    (row,) = values["rows"]
    changed = row | change
    values["rows"] = [{key: x for key, x in changed.items() if x is not None}]
    table = tmp_path / "published.json"
    table.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"the row '{row['name']}' {problem}"):
        read_rows(table)


def test_all_pages_state_the_same_figures_of_the_comparison():
    """`python -m benchmarks.published --estimated --rows a100,h100` prints them."""
    judged = sum(row.use == "judged by" for row in GPU_ROWS)
    (planning,) = re.findall(
        rf"A100 and H100 \(estimated\) \| (\d+) of {judged} runs within 20 %, "
        r"(\d+ %) off",
        (ROOT / "docs/guides/planning.md").read_text(),
    )
    (results,) = re.findall(
        rf"against {judged} public runs on A100 and H100 .* \| (\d+) within 20 % "
        r"of the predicted step, (\d+ %) off",
        (ROOT / "docs/results.md").read_text(),
    )
    (readme,) = re.findall(
        rf"with {judged} public GPU runs \| (\d+) within 20 %",
        (ROOT / "README.md").read_text(),
    )
    assert planning == results
    assert readme == planning[0]


def test_the_readme_and_the_results_quote_the_same_losses():
    """They quote the recipes, and the default run with its compressors."""
    readme = (ROOT / "README.md").read_text()
    results = (ROOT / "docs/results.md").read_text()
    for pattern in (
        r"`python -m train`.*\*\*([\d.]+) bits per byte\*\*.*gzip -9: ([\d.]+)",
        r"nanoGPT's CPU preset and recipe \| validation \*\*([\d.]+)\*\* nats",
        r"same size and .*tokens, modern recipe.*validation \*\*([\d.]+)\*\* nats",
    ):
        (shown,) = re.findall(pattern, readme)
        assert [shown] == re.findall(pattern, results), pattern
