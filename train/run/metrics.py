"""The two logs of a run: metrics by step, and events that account for the wall time.

These logs are the primary record of a run; trackers and reports are derived from them.
A restart leaves neither duplicate nor missing steps: `open_metrics` drops the lines
after the restored step, and repeated steps are written again. run/jsonl.py makes lines
survive kills and full disks. Call `flush` before a checkpoint is saved: otherwise a
failure may lose lines of steps that the checkpoint includes and no restart repeats.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from train.liveness import state_and_start
from train.run.jsonl import Appender, open_lines
from train.run.jsonl_reader import Row, iterate_rows, newest_rows

log = logging.getLogger(__name__)

_IMPORTED = time.monotonic()
_SCORES = ("eval/", "eval_final/", "eval_whole/", "tasks/")
_EVENT_NUMBERS = ("time", "seconds", "step", "steps", "rewind_to")


def read_metrics(run_dir: epath.Path | Path) -> list[Row]:
    """Return the lines of the metrics in order."""
    return list(iterate_metrics(run_dir))


def iterate_metrics(run_dir: epath.Path | Path) -> Iterator[Row]:
    """Yield the lines of the metrics in order, reading as `iterate_rows` does."""
    return iterate_rows(run_dir, "metrics", is_metrics_row)


def newest_metrics(run_dir: epath.Path | Path) -> Iterator[Row]:
    """Yield the lines of the metrics, newest first, reading only what is consumed."""
    return newest_rows(run_dir, "metrics", is_metrics_row)


def tokens_at(
    run_dir: epath.Path | Path, step: int, tokens_before: Callable[[int], int]
) -> int:
    """Return the number of tokens in the first `step` steps, from the metrics.

    The newest of their lines that has `tokens` counts. `tokens_before` returns the
    number of tokens in the batches of all earlier steps, which is added for later ones.
    """
    for row in newest_metrics(run_dir):
        tokens = row.get("tokens")
        if isinstance(tokens, int | float) and row["step"] <= step:
            return int(tokens) + tokens_before(step) - tokens_before(row["step"])
    return tokens_before(step)


def read_events(run_dir: epath.Path | Path) -> list[Row]:
    """Return the lines of the events in order."""
    return list(iterate_rows(run_dir, "events", is_event_row))


def is_metrics_row(row: Row) -> bool:
    """Return whether an object is a line of the metrics, which must have a step."""
    return isinstance(row.get("step"), int)


def is_event_row(row: Row) -> bool:
    """Return whether an object is a line of the events."""
    has_names = isinstance(row.get("start"), int) and isinstance(row.get("event"), str)
    return has_names and all(
        isinstance(row.get(key), int | float | None) for key in _EVENT_NUMBERS
    )


def open_metrics(
    run_dir: epath.Path | Path, last_step: int, scored_again: bool = False
) -> Appender:
    """Open the metrics for appending lines with a `step`.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        last_step: lines of later steps are dropped, atomically.
        scored_again: drop the scores of `last_step` too, because this start evaluates
            that step again: an earlier start ended before it wrote the results.

    Raises:
        OSError: the lines cannot be read, or later ones cannot be dropped.
    """

    def keep(row: Row) -> bool:
        if scored_again and row["step"] == last_step:
            return not any(key.startswith(_SCORES) for key in row)
        return row["step"] <= last_step

    return open_lines(run_dir, "metrics", keep, is_metrics_row)


class EventLog:
    """Writes the events: laps that follow each other without a gap, and instants.

    Each line has `time` (Unix seconds at the event's end), `start` (the number of the
    start, from 1), `event` (its name), `seconds` (0 for an instant), and the caller's
    fields. The first lap begins with the process, so that all laps of a start add up to
    its wall time. The first line of a later start is `idle`: the time from the last lap
    of the previous start to the beginning of this process. So the time after the last
    lap of a killed process counts as idle. train/run/goodput.py lists the laps' names.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        began: when this start began (time.monotonic()), if not with its process.
        write: whether lines are written; True only on process 0.
        last_start: the highest number of a start in `starts/`, in case the events are
            lost.
    """

    def __init__(
        self,
        run_dir: epath.Path | Path,
        *,
        began: float | None = None,
        write: bool = True,
        last_start: int = 0,
    ):
        self._lines = None
        self.start = 1
        self._began = find_process_start() if began is None else began
        self._last_lap_end = self._began
        self._previous_end: float | None = None  # Unix time of the last earlier lap
        self._has_lines = False
        self._exit_code = None
        if write:
            self._lines = open_lines(run_dir, "events", is_row=is_event_row)
            for row in newest_rows(run_dir, "events", is_event_row):
                self.start = max(self.start, row["start"] + 1)
                if row.get("seconds"):  # a lap
                    self._previous_end = row.get("time") or 0.0
                    break
            if self.start == 1 and last_start:
                log.warning(
                    "%s: the events of %d earlier starts are gone: the file was "
                    "emptied or deleted. Goodput counts from this start on",
                    *(epath.Path(run_dir) / "events.jsonl", last_start),
                )
            self.start = max(self.start, last_start + 1)

    def lap(
        self,
        event: str,
        parts: Mapping[str, float] | None = None,
        *,
        until: float | None = None,
        **fields: Any,
    ) -> None:
        """Record the time since the last lap, up to `until` (time.monotonic()) or now.

        `parts` maps other events to their share of this time, in seconds.
        """
        now = time.monotonic()
        ended = now if until is None else until
        # The lap ends at the rounded time, so that rounding errors do not add up.
        seconds = round(ended - self._last_lap_end, 6)
        self._last_lap_end += seconds
        recorded_until = time.time() - (now - ended) - seconds
        for name, reported_s in (parts or {}).items():
            part_s = round(min(max(reported_s, 0.0), seconds), 6)
            seconds = seconds - part_s
            recorded_until = recorded_until + part_s
            self._append(recorded_until, name, part_s)
        self._append(recorded_until + seconds, event, seconds, **fields)

    def record(self, event: str, **fields: Any) -> None:
        """Record an event that takes no time; any thread may call this."""
        self._append(time.time(), event, 0.0, **fields)

    def end(self, code: int) -> None:
        """Set the exit code, which `close` writes as the last line of this start.

        A start without this line was killed.
        """
        self._exit_code = code

    def flush(self) -> None:
        """Make all lines survive the loss of this machine, as `Appender.flush` does."""
        if self._lines:
            self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; later lines are ignored.

        A start that has recorded neither a line nor its end leaves no trace.
        """
        if self._lines:
            if self._has_lines or self._exit_code is not None:
                self.lap("close")
            if self._exit_code is not None:
                self.record("end", code=self._exit_code)
            self._lines.close()
            self._lines = None

    def _append(
        self, ended_at: float, event: str, seconds: float, **fields: Any
    ) -> None:
        if not self._lines:
            return
        if not self._has_lines:
            self._has_lines = True
            if self._previous_end is not None:
                began = time.time() - (time.monotonic() - self._began)
                # The clocks of two hosts may disagree; the time must not be negative.
                self._append(began, "idle", max(0.0, began - self._previous_end))
        row = {"time": round(ended_at, 3), "start": self.start, "event": event}
        self._lines.append({**row, "seconds": round(seconds, 6), **fields})


def find_process_start() -> float:
    """Return when this process, or at least its imports, began (time.monotonic())."""
    try:
        _, start = state_and_start(os.getpid())
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_s -= int(start or "") / os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError):  # this is not Linux
        return _IMPORTED
    return min(time.monotonic() - age_s, _IMPORTED)
