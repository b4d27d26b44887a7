"""Only evaluations of the same rows are compared, and each is shown with its name."""

import json
from pathlib import Path

import pytest
from etils import epath

from train.run.comparison import compare_runs
from train.run.evaluations import read_scores
from train.run.report import report_data
from train.run.validations import Validation, headline, read_validations
from train.status import read_status


def score(step: int, loss: float | None, targets: int = 100, prefix: str = "eval"):
    return {
        "step": step,
        f"{prefix}/loss": loss,
        f"{prefix}/bits_per_byte": None if loss is None else loss / 2,
        f"{prefix}/targets": targets,
    }


def whole_score(step: int, loss: float | None):
    return score(step, loss, 5000, "eval_whole")


def write(folder: Path, rows):
    """Write a run of 30 steps with these metrics."""
    folder.mkdir(exist_ok=True)
    text = "data: {document_start: true}\ntrain: {num_steps: 30}\n"
    (folder / "config.yaml").write_text(text)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    return epath.Path(folder)


# Each case is rows, and the steps of the last, the best and the whole evaluation.
RUNS = {
    "the whole set is worse than every part": (
        [score(10, 3.0), score(20, 2.0), score(30, 1.9), whole_score(30, 3.5)],
        (30, 30, 30),
    ),
    "the whole set is better than every part": (
        [score(10, 2.0), score(20, 3.0), score(30, 2.5), whole_score(30, 1.0)],
        (30, 10, 30),
    ),
    "other rows from step 20 on": (
        [score(10, 1.0), score(20, 3.0, 200), score(30, 2.5, 200)],
        (30, 30, None),
    ),
    "other rows, and then the first ones again": (
        [score(10, 1.0), score(20, 3.0, 200), score(30, 2.5)],
        (30, 30, None),
    ),
    "a loss that is not finite": (
        [score(10, 2.0), score(20, None), whole_score(30, None)],
        (10, 10, None),
    ),
    "no evaluation": ([{"step": 10, "loss": 1.0}], (None, None, None)),
}


@pytest.mark.parametrize("name", RUNS)
def test_only_losses_of_the_same_rows_are_compared(tmp_path, name):
    rows, steps = RUNS[name]
    validations = read_validations(write(tmp_path / "run", rows))
    evaluations = validations.last, validations.best, validations.whole
    assert tuple(evaluation and evaluation.step for evaluation in evaluations) == steps


def figures_of(data: dict, title: str) -> list[str]:
    return [value for name, value, _ in data["figures"] if name == title]


def test_every_display_names_the_whole_set(tmp_path):
    rows = [score(10, 2.0), score(20, 2.5), score(30, 2.25), whole_score(30, 1.0)]
    run = write(tmp_path / "run", rows)
    status = read_status(run).validation
    assert status.best == Validation(10, 2.0, 1.0)
    assert status.whole == Validation(30, 1.0, 0.5)
    data = report_data(run)
    assert figures_of(data, "Best validation loss") == ["2.0000"]
    assert figures_of(data, "Loss of whole set") == ["1.0000"]
    (chart,) = [chart for chart in data["charts"] if chart["title"] == "Loss"]
    lines = {line["name"]: line["points"] for line in chart["lines"]}
    assert lines["whole validation set"] == [(30, 1.0)]
    assert (30, 1.0) not in lines["validation"]
    (_, headers, [cells]), *_ = compare_runs([run])["tables"]
    figures = dict(zip(headers, cells, strict=True))
    assert figures["Best validation loss"] == "2.0000"
    assert figures["Last validation loss"] == "2.2500"
    assert figures["Loss of whole set"] == "1.0000"


def test_scores_say_whether_they_are_of_the_whole_set(tmp_path):
    run = write(tmp_path / "run", [])
    (run / "evaluations").mkdir()
    records = {
        "6-b": {"asked": {"sets": {}, "num_batches": 4}, "eval/loss": 2.0},
        "7-c": {
            "asked": {"sets": {}, "num_batches": None},
            **{"eval_whole/loss": 3.0, "eval_whole/web/loss": 4.0},
            "eval_whole/targets": 9,
        },
        "8-d": {"asked": {"tasks": ["a"], "limit": None}, "tasks/a/acc": 0.5},
    }
    for name, record in records.items():
        text = json.dumps({"step": int(name[0]), **record})
        (run / "evaluations" / f"{name}.json").write_text(text)
    scores = [
        (s.subject, s.value, s.step) for s in read_scores(run, [whole_score(30, 0.5)])
    ]
    assert scores == [
        ("validation, whole", "0.5000", 30),
        ("validation, whole", "0.2500", 30),
        ("validation", "2.0000", 6),
        ("validation, whole", "3.0000", 7),
        ("web, whole", "4.0000", 7),
        ("a", "0.5000", 8),
    ]


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (("eval/loss",), "eval"),
        (("eval/loss", "eval_whole/loss"), "eval_whole"),
        (("eval_final/loss", "eval/loss"), "eval_final"),
        ((), "eval"),
    ],
)
def test_the_headline_is_the_score_of_most_rows(names, prefix):
    assert headline(dict.fromkeys(names, 1.0)) == prefix
