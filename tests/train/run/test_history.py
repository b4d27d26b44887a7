"""The records of a run show whether it has had a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from etils import epath

from train.run.history import evidence_of_checkpoint

INTERVAL = 10  # steps until the first save


@pytest.fixture
def evidence(tmp_path: Path):
    """Return a function that writes the records of a run and returns the evidence."""

    def evidence(
        events: list[tuple[str, int]],
        last_metrics_step: int = 0,
        results_step: int = 0,
        begun_at: int = 0,
        has_unsealed_mark: bool = False,
    ) -> str:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        (run / "starts").mkdir(parents=True)
        (run / "checkpoints" / "unsealed").mkdir(parents=True)
        rows = [{"start": 1, "event": name, "step": step} for name, step in events]
        (run / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        rows = [{"step": step} for step in range(1, last_metrics_step + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (run / "starts" / "1.yaml").write_text(yaml.safe_dump({"step": begun_at}))
        if results_step:
            (run / "results.json").write_text(json.dumps({"step": results_step}))
        if has_unsealed_mark:
            (run / "checkpoints" / "unsealed" / "10").write_text("")
        return evidence_of_checkpoint(epath.Path(run), INTERVAL)

    return evidence


# Each start records the step that it restored. A new run records step 0.
BEGUN = ("restore", 0)
HAD_ONE = {
    "a save": ([BEGUN, ("saved", 10)], {}),
    "a save, and another that was killed": (
        [BEGUN, ("saved", 10)],
        {"has_unsealed_mark": True},
    ),
    "a save, and one that failed": ([BEGUN, ("saved", 10), ("save_failed", 20)], {}),
    "a restore": ([("restore", 10)], {}),
    "a restore, after which a save failed": (
        [BEGUN, ("saved", 10), ("restore", 10), ("save_failed", 20)],
        {},
    ),
    "results": ([], {"results_step": 20}),
    "a start that continued": ([], {"begun_at": 10}),
    "no events, but metrics after a save": ([], {"last_metrics_step": 11}),
    "no event of a save, but metrics after it": ([BEGUN], {"last_metrics_step": 15}),
}
HAD_NONE = {
    "nothing": ([], {}),
    "a crash before the first save": ([BEGUN], {"last_metrics_step": 9}),
    "a crash when the first save began": ([BEGUN], {"last_metrics_step": 10}),
    "a kill in the first save": (
        [BEGUN],
        {"last_metrics_step": 15, "has_unsealed_mark": True},
    ),
    "a full disk": ([BEGUN, ("save_failed", 10)], {"last_metrics_step": 19}),
    "a save, and a new run since": ([("saved", 10), BEGUN], {"last_metrics_step": 5}),
}


@pytest.mark.parametrize(("events", "others"), HAD_ONE.values(), ids=[*HAD_ONE])
def test_each_of_these_records_shows_a_checkpoint(evidence, events, others):
    assert evidence(events, **others)


@pytest.mark.parametrize(("events", "others"), HAD_NONE.values(), ids=[*HAD_NONE])
def test_a_run_without_a_checkpoint_may_start_over(evidence, events, others):
    assert evidence(events, **others) == ""
