"""The run's own record: metrics by step, and events: what the wall time went to.

These two logs are the truth about a run; trackers and reports are copies. A restart
leaves neither duplicate nor missing steps: `open_metrics` drops what the restored
state has not done yet, and the steps done again are written again. How the lines are
kept, and what a kill or a full disk does to them: `run/jsonl.py`. Call `flush` before
a checkpoint is saved, or a kill may cost lines of steps that no restart does again.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from train.run.jsonl import Appender, Row, newest_rows, open_lines, read_rows
from train.run.liveness import state_and_start

_IMPORTED = time.monotonic()


def read_metrics(run_dir: epath.Path | Path) -> list[Row]:
    """Return the lines of the metrics in order; none if there are none."""
    return read_rows(run_dir, "metrics")


def tokens_at(run_dir: epath.Path | Path, step: int, per_step: int) -> int:
    """Return the `tokens` of the metrics after a step.

    Each step after the newest line that has them counts `per_step`.
    """
    rows = newest_rows(run_dir, "metrics")
    newest = next((row for row in rows if "tokens" in row), {})
    return newest.get("tokens", 0) + (step - newest.get("step", 0)) * per_step


def read_events(run_dir: epath.Path | Path) -> list[Row]:
    """Return the lines of the events in order; none if there are none."""
    return read_rows(run_dir, "events")


def open_metrics(
    run_dir: epath.Path | Path, last_step: int, scored_again: bool = False
) -> Appender:
    """Open the metrics, for lines that have their `step`, to append to them.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        last_step: number of completed updates in the state this start goes on
            from (0 when fresh). Lines of later steps are dropped, atomically.
        scored_again: drop scores of that step too: a start that was killed behind
            them has left no results, and this one scores it once more.

    Raises:
        OSError: if the lines there are cannot be read, or the later ones dropped.
    """

    def keep(row: Row) -> bool:
        if scored_again and row.get("step") == last_step:
            return not any(key.startswith(("eval/", "tasks/")) for key in row)
        return row.get("step", 0) <= last_step

    return open_lines(run_dir, "metrics", keep)


class EventLog:
    """Writes the events: laps that follow each other without a gap, and instants.

    Each line has `time` (unix seconds at the event's end), `start` (which start of
    the run, from 1), `event`, `seconds`, and what the caller adds. The first lap of a
    start begins with its process, so that the seconds of a start add up to its wall
    time. Its first line is `idle`: from the last lap of the start before to the
    process' beginning. So the time after the last lap of a process that was killed
    counts as idle, whatever instants it recorded then. What the laps are called:
    train/run/goodput.py.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        began: when this start began (time.monotonic()), if not with its process.
        write: False on every process but the first: nothing is touched then.
    """

    def __init__(
        self,
        run_dir: epath.Path | Path,
        *,
        began: float | None = None,
        write: bool = True,
    ):
        self._lines, self.start = None, 1
        self._began = self._lapped = process_began() if began is None else began
        self._earlier_s: float | None = None  # end of the last lap before this start
        self._any, self._code = False, None
        if write:
            self._lines = open_lines(run_dir, "events")
            for row in newest_rows(run_dir, "events"):
                self.start = max(self.start, row.get("start", 0) + 1)
                if row.get("seconds"):  # a lap
                    self._earlier_s = row.get("time", 0.0)
                    break

    def lap(
        self,
        event: str,
        parts: Mapping[str, float] | None = None,
        *,
        until: float | None = None,
        **fields: Any,
    ) -> None:
        """Record the time since the last lap.

        Args:
            event: what it went to.
            parts: seconds of it that went to other events.
            until: when the lap ended (time.monotonic()), if not now.
            fields: for the line of `event`; must fit in JSON.
        """
        now = time.monotonic()
        ended = now if until is None else until
        # Rounded here, so that the error of a sum does not grow.
        seconds = round(ended - self._lapped, 6)
        self._lapped += seconds
        at = time.time() - (now - ended) - seconds
        for part, asked_s in (parts or {}).items():
            part_s = round(min(max(asked_s, 0.0), seconds), 6)
            seconds, at = seconds - part_s, at + part_s
            self._append(at, part, part_s)
        self._append(at + seconds, event, seconds, **fields)

    def record(self, event: str, **fields: Any) -> None:
        """Record an instant, which takes no time; from any thread."""
        self._append(time.time(), event, 0.0, **fields)

    def end(self, code: int) -> None:
        """Note the exit code of this start: its last line, written by `close`.

        A start without it was killed.
        """
        self._code = code

    def flush(self) -> None:
        """Make all lines outlive this machine, as `Appender.flush` does."""
        if self._lines:
            self._lines.flush()

    def close(self) -> None:
        """Write what is left; the log takes no line after this.

        A start that has recorded nothing, and has not ended, leaves no trace.
        """
        if self._lines:
            if self._any or self._code is not None:
                self.lap("close")
            if self._code is not None:
                self.record("end", code=self._code)
            self._lines.close()
            self._lines = None

    def _append(self, at: float, event: str, seconds: float, **fields: Any) -> None:
        if not self._lines:
            return
        if not self._any:
            self._any = True
            if self._earlier_s is not None:
                began = time.time() - (time.monotonic() - self._began)
                # The clocks of two hosts may disagree.
                self._append(began, "idle", max(0.0, began - self._earlier_s))
        row = {"time": round(at, 3), "start": self.start, "event": event}
        self._lines.append({**row, "seconds": round(seconds, 6), **fields})


def process_began() -> float:
    """Return when this process began (time.monotonic()); where unknown, its imports."""
    try:
        _, start = state_and_start(os.getpid())
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_s -= int(start or "") / os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError):  # not Linux
        return _IMPORTED
    return min(time.monotonic() - age_s, _IMPORTED)
