"""The run's own record: `metrics.jsonl`, `events.jsonl`, one JSON object a line.

These two files are the truth about a run; trackers and reports are copies. A
restart leaves neither duplicate nor missing steps: opening `MetricsLog` drops
what the restored state has not done yet, and the steps done again are written
again. A line torn by a kill is dropped at the next opening and skipped by readers.

On a local disk each line is with the operating system when `write` returns. Objects
under `gs://` or `s3://` cannot grow, so there the file is uploaded whole, at most
once a minute: call `flush` before a checkpoint is saved, or a kill may cost lines of
steps that no restart does again.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath

_logger = logging.getLogger(__name__)
_UPLOAD_INTERVAL_S = 60.0


def _parse(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of `data` that are JSON objects, each with its object."""
    rows = []
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append((line + b"\n", row))
    return rows


def _finite(value: Any) -> Any:
    """Make a value JSON: numpy and JAX scalars to Python's, non-finite to None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line(row: Mapping[str, Any]) -> bytes:
    clean = {key: _finite(value) for key, value in row.items()}
    return json.dumps(clean, allow_nan=False).encode() + b"\n"


class _JsonLines:
    """A file of JSON lines that keeps `lines` of the old and grows by whole ones."""

    def __init__(self, path: epath.Path, old: bytes, lines: Iterable[bytes]):
        self._path = path
        self._remote = "://" in os.fspath(path)
        content = b"".join(lines)
        path.parent.mkdir(parents=True, exist_ok=True)
        if content != old:
            # A single object's upload is atomic; a local file needs the rename.
            new = path if self._remote else path.parent / f"{path.name}.tmp"
            new.write_bytes(content)
            if not self._remote:
                # Else a power cut may leave the new name with nothing in it.
                with Path(new).open("rb") as file:
                    os.fsync(file.fileno())
                new.replace(path)
        if self._remote:
            self._content = bytearray(content)
            self._uploaded_s, self._changed = time.monotonic(), False
        else:
            # Unbuffered: a line is one write(2), so threads do not interleave.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115

    def append(self, row: Mapping[str, Any]) -> None:
        if not self._remote:
            self._file.write(_line(row))
            return
        self._content += _line(row)
        self._changed = True
        if time.monotonic() - self._uploaded_s > _UPLOAD_INTERVAL_S:
            try:
                self.flush()
            except Exception as error:  # the next upload carries these lines too
                self._uploaded_s = time.monotonic()
                _logger.warning(
                    "could not upload %s, will retry: %s", self._path, error
                )

    def flush(self) -> None:
        if not self._remote:
            os.fsync(self._file.fileno())
        elif self._changed:
            self._path.write_bytes(bytes(self._content))
            self._uploaded_s, self._changed = time.monotonic(), False

    def close(self) -> None:
        if self._remote:
            self.flush()
        else:
            self._file.close()


def _read(path: epath.Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def read_metrics(run_dir: epath.Path | Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` in order; none if there is no file."""
    return [row for _, row in _parse(_read(epath.Path(run_dir) / "metrics.jsonl"))]


def read_events(run_dir: epath.Path | Path) -> list[dict[str, Any]]:
    """Return the lines of `events.jsonl` in order; none if there is no file."""
    return [row for _, row in _parse(_read(epath.Path(run_dir) / "events.jsonl"))]


class MetricsLog:
    """Writes `metrics.jsonl`.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        last_step: number of completed updates in the state this start goes on
            from (0 when fresh). Lines of later steps are dropped, atomically.
        write: False on every process but the first: nothing is touched then.
    """

    def __init__(
        self, run_dir: epath.Path | Path, last_step: int, *, write: bool = True
    ):
        self._lines = None
        if write:
            path = epath.Path(run_dir) / "metrics.jsonl"
            old = _read(path)
            rows = _parse(old)
            kept = (line for line, row in rows if row.get("step", 0) <= last_step)
            self._lines = _JsonLines(path, old, kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line, `step` first; non-finite values become null."""
        if self._lines:
            self._lines.append({"step": step, **values})

    def flush(self) -> None:
        """Make all lines outlive this machine (fsync, or the upload)."""
        if self._lines:
            self._lines.flush()

    def close(self) -> None:
        """Write what is left; the log takes no line after this."""
        if self._lines:
            self._lines.close()
            self._lines = None


class EventLog:
    """Writes `events.jsonl`: what the wall time of the run went to.

    Each line has `time` (unix seconds at the event's end), `start` (which start of
    the run, from 1), `event`, `seconds`, and what the caller adds. Opening records
    `idle`, the time since the last line of the start before. Events: init, compile,
    restore, step (one a log interval, with `steps`), save, eval, data_wait, idle.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        write: False on every process but the first: nothing is touched then.
    """

    def __init__(self, run_dir: epath.Path | Path, *, write: bool = True):
        self._lines, self.start = None, 1
        if not write:
            return
        path = epath.Path(run_dir) / "events.jsonl"
        old = _read(path)
        rows = _parse(old)
        self._lines = _JsonLines(path, old, (line for line, _ in rows))
        if rows:
            self.start = max(row.get("start", 0) for _, row in rows) + 1
            idle_s = time.time() - max(row.get("time", 0.0) for _, row in rows)
            self.record("idle", max(0.0, idle_s))  # clocks of two hosts may disagree

    def record(self, event: str, seconds: float, **fields: Any) -> None:
        """Append an event of `seconds` that ends now; `fields` must fit in JSON."""
        if self._lines:
            now = round(time.time(), 3)
            row = {"time": now, "start": self.start, "event": event}
            self._lines.append({**row, "seconds": round(seconds, 6), **fields})

    @contextmanager
    def span(self, event: str, **fields: Any) -> Iterator[None]:
        """Record what the body took, also when it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.record(event, time.monotonic() - began, **fields)

    def flush(self) -> None:
        """Make all lines outlive this machine (fsync, or the upload)."""
        if self._lines:
            self._lines.flush()

    def close(self) -> None:
        """Write what is left; the log takes no line after this."""
        if self._lines:
            self._lines.close()
            self._lines = None
