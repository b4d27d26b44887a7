import json
import subprocess
import sys
import time
from pathlib import Path

from tests.fleet import REPOSITORY
from tests.program import program_code
from tests.train.run.conftest import Clocks
from train.run import metrics
from train.run.metrics import (
    EventLog,
    open_metrics,
    read_events,
    read_metrics,
    tokens_at,
)


def _steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir)]


def _write(run_dir: Path, steps: range, last_step: int) -> None:
    log = open_metrics(run_dir, last_step)
    for step in steps:
        log.append({"step": step, "loss": 1.0 / step})
    log.close()


def test_a_restart_leaves_neither_duplicate_nor_missing_steps(tmp_path):
    _write(tmp_path, range(1, 13), last_step=0)  # killed at 12, last saved at 10
    _write(tmp_path, range(11, 16), last_step=10)
    assert _steps(tmp_path) == list(range(1, 16))


def test_a_score_from_before_a_kill_is_not_recorded_twice(tmp_path):
    """Only the last step is scored again, so earlier scores stay."""
    rows = [
        {"step": 5, "loss": 1.0},
        {"step": 5, "eval/loss": 1.0},
        {"step": 10, "loss": 0.5},
        {"step": 10, "eval/loss": 0.5, "tasks/mine/acc": 0.2},
    ]
    log = open_metrics(tmp_path, 0)
    for row in rows:
        log.append(row)
    log.close()
    open_metrics(tmp_path, 10).close()
    assert read_metrics(tmp_path) == rows
    open_metrics(tmp_path, 10, scored_again=True).close()
    assert read_metrics(tmp_path) == rows[:3]


def test_tokens_are_those_of_the_newest_line_and_of_the_batches_after_it(tmp_path):
    """Batches of 100 tokens may have fewer targets, of which the lines tell."""
    rows = [{"step": 5, "tokens": 350}, {"step": 5, "eval/loss": 1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert tokens_at(tmp_path, 5, lambda step: 100 * step) == 350
    assert tokens_at(tmp_path, 7, lambda step: 100 * step) == 550
    assert tokens_at(tmp_path, 4, lambda step: 100 * step) == 400


def test_other_processes_touch_nothing(tmp_path):
    run_dir = tmp_path / "run"
    events = EventLog(run_dir, write=False)
    events.lap("compile")
    events.record("skipped", step=3)
    events.end(0)
    events.close()
    assert not run_dir.exists()
    assert read_metrics(run_dir) == read_events(run_dir) == []


def test_starts_are_counted_and_the_idle_time_between_is_never_negative(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics, "time", clocks := Clocks())
    for now, skew, began in [(30, 0, 0), (190, 0, 120), (300, -1000, 290), (400, 0, 0)]:
        clocks.now = float(now)
        clocks.skew = skew
        log = EventLog(tmp_path, began=float(began))
        if now < 400:  # the last one records nothing
            log.lap("prepare")
        else:
            log.close()
        # A kill leaves such a line, because the log was not closed.
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"time": 10')
    rows = read_events(tmp_path)
    assert [(r["start"], r["event"], r["time"], r["seconds"]) for r in rows] == [
        (1, "prepare", 2030.0, 30.0),
        *[(2, "idle", 2120.0, 90.0), (2, "prepare", 2190.0, 70.0)],
        *[(3, "idle", 1290.0, 0.0), (3, "prepare", 1300.0, 10.0)],
    ]


def test_a_start_begins_with_its_process(tmp_path):
    code = program_code(
        "import sys, time\ntime.sleep(0.5)\n"
        "from train.run.metrics import EventLog\n"
        "events = EventLog(sys.argv[1])\nevents.lap('start')\nevents.close()"
    )
    start_time = time.time()
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=True
    )
    end_time = time.time()
    (row, close) = read_events(tmp_path)
    assert close["event"] == "close"
    # The times in /proc count hundredths of a second.
    assert 0.5 < row["seconds"] < end_time - start_time + 0.02
    assert start_time - 0.02 < row["time"] - row["seconds"] < end_time
