"""Of what ends a run with a notice: does that leave the time to save?"""

import json
import logging

from etils import epath

from launch.host_resources import estimated_save_s
from launch.job import Job

log = logging.getLogger(__name__)


def warn_of_short_notice(job: Job, notice_s: float, what: str) -> None:
    """Warn where a save takes longer than the notice, in words that begin with `what`.

    The run's own saves say so, if it was ever started; else the plan, by an estimate.
    """
    if measured := _saves_s(job):
        save_s = max(measured)
        took = f"took {save_s:.0f} s in this run"
    elif job.staged_bytes is not None:
        save_s = estimated_save_s(job.staged_bytes)
        took = f"takes some {save_s:.0f} s, estimated at 1 GB/s a host"
    else:
        return
    if save_s > notice_s:
        log.warning(
            "%s %.0f s, but a save %s: that may cost the steps since the save before; "
            "checkpoint.save_interval_minutes bounds them",
            *(what, notice_s, took),
        )


def _saves_s(job: Job) -> list[float]:
    """Return how long each save of the run has held it up."""
    file = epath.Path(job.run_dir) / "events.jsonl"
    try:
        events = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):  # never started, or a line was cut off
        return []
    return [float(e["seconds"]) for e in events if e.get("event") == "save"]
