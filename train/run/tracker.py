"""Copy metrics to trackers: W&B, TensorBoard and MLflow.

A tracker never prompts, never blocks and never breaks training. Its library, including
the import, runs on a thread. A failing or silent tracker causes only one warning.

`metrics.jsonl` is the truth, and a tracker is a copy. Each start first sends the lines
that the tracker lacks after an outage or a kill, so the tracker has each step once.
(TensorBoard replaces the steps that `run.rewind_to` repeats; W&B and MLflow keep their
first values.)

All files of a tracker are under `<run_dir>/<tracker>/`. If the run is remote, they stay
in a local temporary folder until the start ends.
"""

import contextlib
import itertools
import logging
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from typing import Any

from etils import epath

from data.storage import is_remote, upload_folder, write_atomically
from train.config import TrackerConfig
from train.run.metrics import newest_metrics
from train.run.trackers.mlflow import MlflowWriter
from train.run.trackers.tensorboard import TensorBoardWriter
from train.run.trackers.wandb import FINISH_TIMEOUT_S, WandbWriter
from train.run.trackers.writer import Line, TrackedRun, Writer

_logger = logging.getLogger(__name__)
_SILENT_S = 60.0  # a call that takes longer causes a warning
_MAX_WAITING = 10_000  # lines in the queue of a tracker
_MAX_CHUNK = 100  # lines in one call of `Writer.write`


class Tracker:
    """Accepts metrics, returns at once, and raises nothing."""

    def __init__(self, run: TrackedRun | None = None, writers: Sequence[Writer] = ()):
        """Start a thread for each writer."""
        self._threads = [_WriterThread(run, writer) for writer in writers if run]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of a step; steps must not decrease from call to call."""
        for thread in self._threads:
            thread.log(step, values)

    def finish(self) -> None:
        """Wait a bounded time until all queued values are stored."""
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def open_tracker(config: TrackerConfig, run: TrackedRun) -> Tracker:
    """Return a tracker that writes to all trackers that `config` enables."""
    writers: list[Writer] = []
    if config.wandb.enabled:
        writers.append(WandbWriter(run, config.wandb))
    if config.tensorboard.enabled:
        writers.append(TensorBoardWriter(run))
    if config.mlflow.enabled:
        writers.append(MlflowWriter(run, config.mlflow))
    return Tracker(run, writers)


class _WriterThread:
    """Writes lines from a bounded queue to one tracker.

    `<folder>/last_step` is the step up to which all lines were written.
    """

    def __init__(self, run: TrackedRun, writer: Writer):
        self._run = run
        self._writer = writer
        self._queue: Queue[Line] = Queue(_MAX_WAITING)
        self._ended = threading.Event()
        self._working = True
        self._warned = False
        self._busy_since: float | None = None  # None while the thread waits for lines
        name = writer.name
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a line; a full queue turns the tracker off."""
        if not self._working:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except Full:
            self._stop(
                f"{_MAX_WAITING:,} lines wait for it; the next start brings them"
            )
        busy_since = self._busy_since
        if busy_since and time.monotonic() - busy_since > _SILENT_S:
            self._warn("has not answered for %.0f s, training goes on", _SILENT_S)

    def end(self) -> None:
        """Let the thread end once all lines are written."""
        self._ended.set()
        with contextlib.suppress(Full):
            self._queue.put_nowait((-1, {}))  # wakes the thread

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._working:
            self._warn("did not finish in %.0f s, going on", FINISH_TIMEOUT_S)
        self._working = False

    def _warn(self, message: str, *values: Any) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(f"%s {message}", self._writer.name, *values)

    def _stop(self, reason: str) -> None:
        if self._working:
            self._working = False
            _logger.warning("%s is off from here on: %s", self._writer.name, reason)

    def _work(self) -> None:
        run_dir = self._run.run_dir
        name = self._writer.name
        is_remote_run = is_remote(run_dir)
        try:
            self._busy_since = time.monotonic()
            root = Path(tempfile.mkdtemp() if is_remote_run else run_dir).absolute()
            folder = root / name
            mark_file = run_dir / name / "last_step"
            folder.mkdir(parents=True, exist_ok=True)
            marked_step = int(mark_file.read_text()) if mark_file.exists() else -1
            last_step = self._writer.open(folder, marked_step)
            chunks = itertools.chain(self._missing_lines(last_step), self._new_lines())
            step = last_step
            for lines in chunks:
                self._busy_since = time.monotonic()
                if lines := [line for line in lines if line[0] > last_step]:
                    self._writer.write(lines)
                    step = lines[-1][0]
                    # More lines of this step may follow, so mark the step before it.
                    write_atomically(epath.Path(folder / "last_step"), str(step - 1))
            self._writer.close()
            write_atomically(epath.Path(folder / "last_step"), str(step))
            if is_remote_run:
                upload_folder(folder, run_dir / name)
                shutil.rmtree(root, ignore_errors=True)
        except ModuleNotFoundError as error:
            self._stop(f"{error}; pip install -e '.[{name}]'")
        # wandb may even raise SystemExit or its own KeyboardInterrupt.
        except BaseException as error:
            self._stop((str(error).strip() or repr(error)).splitlines()[0])

    def _missing_lines(self, last_step: int) -> Iterator[Sequence[Line]]:
        """Yield the lines of earlier starts after `last_step`, in chunks."""
        rows = itertools.takewhile(
            lambda row: row["step"] > last_step, newest_metrics(self._run.run_dir)
        )
        rows = [row for row in rows if row["step"] <= self._run.step]
        lines = [(row.pop("step"), _without_nulls(row)) for row in reversed(rows)]
        for start in range(0, len(lines), _MAX_CHUNK):
            yield lines[start : start + _MAX_CHUNK]

    def _new_lines(self) -> Iterator[Sequence[Line]]:
        """Yield the lines of this start as they arrive, until `end` is called."""
        while not (self._ended.is_set() and self._queue.empty()):
            self._busy_since = None
            lines = [self._queue.get()]
            while len(lines) < _MAX_CHUNK and not self._queue.empty():
                lines.append(self._queue.get())
            yield lines


def _without_nulls(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row, with NaN in place of null."""
    return {key: math.nan if value is None else value for key, value in row.items()}
