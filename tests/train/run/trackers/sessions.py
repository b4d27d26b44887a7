"""Begin starts of a run that log to a tracker without training."""

import time
from pathlib import Path

from etils import epath

from train.config import TrackerConfig
from train.run.metrics import open_metrics
from train.run.tracker import Tracker, open_tracker
from train.run.trackers.writer import TrackedRun

CONFIG = {"model": {"num_layers": 2}, "seed": 0}


def begin(config: TrackerConfig, run_dir: Path, start: int, step: int, end: int):
    """Return the tracker of a start that continues from `step` and logs up to `end`.

    The loss of a step is 1 / step, and every third step is evaluated, too. The
    learning rate is the number of the start.
    """
    metrics = open_metrics(run_dir, step)
    tracker = open_tracker(
        config, TrackedRun(epath.Path(run_dir), "tiny", CONFIG, step, start)
    )
    for logged_step in range(step + 1, end + 1):
        values = {"loss": 1 / logged_step, "learning_rate": float(start)}
        for line in (values, {"eval/loss": 2.0})[: 1 + (logged_step % 3 == 0)]:
            metrics.append({"step": logged_step, **line})
            tracker.log(logged_step, line)
    metrics.close()
    return tracker


def killed(tracker: Tracker, run_dir: Path, name: str, end: int) -> None:
    """End a start as a kill does, after it has written its last line."""
    mark = run_dir / name / "last_step"
    for _ in range(3000):
        if mark.exists() and mark.read_text() == str(end - 1):
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"{name} wrote no step {end}")
    for thread in tracker._threads:
        thread._working = False  # later messages are ignored


def life(config: TrackerConfig, run_dir: Path, name: str) -> None:
    """Kill a start at step 7, continue from 4 to 9, and then from 9 to 12."""
    killed(begin(config, run_dir, 1, 0, 7), run_dir, name, 7)
    begin(config, run_dir, 2, 4, 9).finish()
    begin(config, run_dir, 3, 9, 12).finish()
