"""Tasks are scored in a run and from its checkpoint, by one process and by two."""

import json
from pathlib import Path

import pytest

from data.program import PREFIX
from tests.fleet import TINY, Fleet, of_text, write_text
from tests.train.evaluate.task_files import NAMES, write_tasks
from tests.train.pages import data_of
from train.run.goodput import goodput_of
from train.run.metrics import read_events, read_metrics

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

TASKS = f"[{','.join(NAMES)}]"
EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "data.sequence_length=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text(tmp_path_factory.mktemp("judged"))
    write_tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Train a run of two processes with four devices each, which also scores tasks."""
    fleet = Fleet(
        folder / "train",
        [
            *(*TINY, *of_text(folder), f"run.dir={folder}/run", *EIGHT),
            *("runtime.cpu_devices=4", "train.num_steps=6"),
            *(f"eval.tasks={TASKS}", f"eval.task_path={folder}/tasks"),
            *("eval.task_interval_steps=3", "eval.task_limit=7"),
        ],
        2,
    )
    assert fleet.wait() == [0, 0], fleet.said() + fleet.said(1)
    assert "task        toy_choices acc_norm" in fleet.said()
    return folder / "run"


def task_scores_of(run: Path) -> dict[int, dict[str, float]]:
    scores = {}
    for row in read_metrics(run):
        task_scores = {
            key: value for key, value in row.items() if key.startswith("tasks/")
        }
        if task_scores:
            scores[row["step"]] = task_scores
    return scores


def evaluate_checkpoint(
    run: Path, logs: Path, devices: int, count: int
) -> dict[str, float]:
    overrides = [
        *(f"run.dir={run}", f"tasks={TASKS}", f"task_path={run.parent}/tasks"),
        *("limit=7", f"runtime.cpu_devices={devices}"),
    ]
    fleet = Fleet(logs, overrides, count, module=f"{PREFIX}train.evaluate")
    assert fleet.wait() == [0] * count, fleet.said() + fleet.said(count - 1)
    lines = [line for line in fleet.said().splitlines() if line.startswith("{")]
    assert "toy_choices  acc_norm" in fleet.said()
    assert "tasks at step 6, 21 examples" in fleet.said()
    assert "WARNING" not in fleet.said()
    if count > 1:
        assert "toy" not in fleet.said(1)
    return json.loads(lines[-1])


def test_a_run_and_its_checkpoint_get_the_same_task_scores(run, folder):
    run_scores = task_scores_of(run)
    assert [*run_scores] == [3, 6]
    results = json.loads((run / "results.json").read_text())
    assert {key: results[key] for key in run_scores[6]} == run_scores[6]
    assert "Tasks: acc_norm" in (run / "report.html").read_text()
    assert goodput_of(read_events(run)).buckets["eval"] > 0
    for devices, count in ((8, 1), (4, 2)):
        scores = evaluate_checkpoint(run, folder / f"of-{count}", devices, count)
        (file,) = (run / "evaluations").iterdir()  # equal requests share a file
        record = json.loads(file.read_text())
        assert record.pop("asked")["limit"] == 7
        assert record == scores
        assert scores.pop("step") == 6
        assert scores == pytest.approx(run_scores[6], rel=1e-5)
    ((_, _, rows),) = data_of((run / "report.html").read_text())["tables"]
    (while_training, later) = (row for row in rows if row[:2] == ["toy_choices", "acc"])
    assert (while_training[3:], later[3:]) == (
        ["6", "while training"],
        ["6", "limit=7"],
    )
    assert " ± 0." in later[2]


def test_processes_with_different_tasks_refuse_to_start(run, folder):
    other_tasks = write_tasks(folder / "other")
    examples = folder / "other" / "toy_choices.jsonl"
    examples.write_text(examples.read_text().replace("what is", "what was"))
    overrides = (f"run.dir={run}", "tasks=[toy_choices]", "runtime.cpu_devices=4")
    paths = f"{folder}/tasks", other_tasks
    options = {"own": lambda process: [f"task_path={paths[process]}"]}
    fleet = Fleet(
        folder / "differ", overrides, 2, module=f"{PREFIX}train.evaluate", **options
    )
    assert fleet.wait() == [78, 78]
    assert "must be the same on all processes" in fleet.said()
    fleet = Fleet(
        folder / "unknown",
        (*overrides[:1], "tasks=[none]"),
        2,
        **{"module": "train.evaluate"},
    )
    assert fleet.wait() == [78, 78]
    assert "is no task of" in fleet.said()
