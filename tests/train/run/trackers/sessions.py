"""Starts of a run as a tracker sees them, without training."""

import time
from pathlib import Path

from etils import epath

from train.config import TrackerConfig
from train.run.metrics import open_metrics
from train.run.tracker import Tracker, open_tracker
from train.run.trackers.writer import TrackedRun

CONFIG = {"model": {"num_layers": 2}, "seed": 0}


def begin(config: TrackerConfig, run_dir: Path, start: int, step: int, end: int):
    """Begin a start that goes on from `step`, and take its steps up to `end`.

    Steps are logged like 1 / step; every third is evaluated, too. In each start the
    learning rate is its number.
    """
    metrics = open_metrics(run_dir, step)
    tracker = open_tracker(
        config, TrackedRun(epath.Path(run_dir), "tiny", CONFIG, step, start)
    )
    for taken in range(step + 1, end + 1):
        values = {"loss": 1 / taken, "learning_rate": float(start)}
        for line in (values, {"eval/loss": 2.0})[: 1 + (taken % 3 == 0)]:
            metrics.append({"step": taken, **line})
            tracker.log(taken, line)
    metrics.close()
    return tracker


def killed(tracker: Tracker, run_dir: Path, name: str, end: int) -> None:
    """Let a start end without a word, after it has written its last line."""
    mark = run_dir / name / "last_step"
    for _ in range(3000):
        if mark.exists() and mark.read_text() == str(end - 1):
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"{name} wrote no step {end}")
    for thread in tracker._threads:
        thread._working = False  # whatever it says now is nobody's business


def life(config: TrackerConfig, run_dir: Path, name: str) -> None:
    """Kill a start at step 7, go on from 4 to 9, then from there to 12."""
    killed(begin(config, run_dir, 1, 0, 7), run_dir, name, 7)
    begin(config, run_dir, 2, 4, 9).finish()
    begin(config, run_dir, 3, 9, 12).finish()
