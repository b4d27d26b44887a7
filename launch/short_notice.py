"""Warn if a preemption notice leaves too little time to save."""

import json
import logging
from pathlib import Path

from launch.host_resources import estimated_save_s
from launch.job import Job

log = logging.getLogger(__name__)


def warn_of_short_notice(job: Job, notice_s: float, source: str) -> None:
    """Warn if a save takes longer than the notice. The warning begins with `source`.

    The duration is the longer of the plan's estimate and of the time for which earlier
    saves stopped the run. The latter is a lower bound, because saves continue in the
    background of training.
    """
    durations = [
        (save_s, f"took {save_s:.0f} s or more in this run") for save_s in _held(job)
    ]
    if job.staged_bytes is not None:
        save_s = estimated_save_s(job.staged_bytes)
        durations.append(
            (save_s, f"takes some {save_s:.0f} s, estimated at 1 GB/s a host")
        )
    save_s, took = max(durations, default=(0.0, ""))
    if save_s > notice_s:
        log.warning(
            "%s %.0f s, but a save %s: that may cost the steps since the save before; "
            "checkpoint.save_interval_minutes bounds them",
            *(source, notice_s, took),
        )


def _held(job: Job) -> list[float]:
    """Return the seconds that each save of a local run has held it up."""
    file = Path(job.run_dir) / "events.jsonl"  # an object store has parts of it
    try:
        events = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):  # never started, or a line was cut off
        return []
    return [float(e["seconds"]) for e in events if e.get("event") == "save"]
