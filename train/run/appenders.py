"""Logs that are open: a local file that grows, or objects that are replaced whole.

What these guarantee, and where the lines lie: train/run/jsonl.py.
"""

import abc
import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

_MAX_LINES = 10_000  # in memory
_PART_BYTES = 2**20
_UPLOAD_INTERVAL_S = 60.0

log = logging.getLogger(__name__)


def part_path(run_dir: epath.Path, name: str, number: int) -> epath.Path:
    """Name the file of a part; 0 is the single file."""
    return run_dir / (f"{name}/{number}.jsonl" if number else f"{name}.jsonl")


class Appender(abc.ABC):
    """A log that is open: takes rows from any thread."""

    def __init__(self, name: str):
        self._name, self._lock, self._warned = name, threading.Lock(), False
        # The newest lines; how many of them, from the first on, have been written.
        self._lines: list[bytes] = []
        self._written = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, now or once it can be written."""
        with self._lock:
            try:
                full = len(self._lines) - self._written >= _MAX_LINES
                if not full:
                    self._lines.append(_line(row))
                self._write()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%s cannot be written: %s; up to %d lines wait in memory "
                        "until it can, further ones are lost",
                        self._name,
                        error,
                        _MAX_LINES,
                    )

    def flush(self) -> None:
        """Make all lines outlive this machine.

        Raises:
            OSError: if that cannot be done now.
        """
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Write what is left, if that can be done; no line is taken after this."""
        try:
            self.flush()
        except OSError as error:
            lost = len(self._lines) - self._written
            log.error("%s lacks its last %d lines: %s", self._name, lost, error)
        self._close()

    @abc.abstractmethod
    def _write(self) -> None: ...

    @abc.abstractmethod
    def _sync(self) -> None: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


class FileAppender(Appender):
    """A local file. `_lines` are those since the last fsync, at `_synced` bytes."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        self._synced = os.fstat(self._fd).st_size

    def _write(self) -> None:
        for line in self._lines[self._written :]:
            end = os.fstat(self._fd).st_size
            try:
                if os.write(self._fd, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._fd, end)
                raise
            self._written += 1
        if self._written >= _MAX_LINES:
            self._sync()

    def _sync(self) -> None:
        if self._written < len(self._lines):
            self._write()
        try:
            os.fsync(self._fd)
        except OSError:
            # What was written may be gone although a second fsync would succeed.
            self._written = 0
            os.ftruncate(self._fd, self._synced)
            raise
        self._synced = os.fstat(self._fd).st_size
        self._lines, self._written = [], 0

    def _close(self) -> None:
        os.close(self._fd)


class PartsAppender(Appender):
    """Objects. `_lines` are those of the newest part."""

    def __init__(self, run_dir: epath.Path, name: str, number: int, lines: list[bytes]):
        super().__init__(f"{run_dir}/{name}")
        self._run_dir, self._log = run_dir, name
        self._number, self._lines, self._written = number, lines, len(lines)
        self._next_if_full()
        self._uploaded_s = time.monotonic()
        self._uploader = ThreadPoolExecutor(1, "upload")
        self._upload: Future[Any] | None = None
        self._uploading = 0  # lines

    def _write(self) -> None:
        if self._upload is not None and self._upload.done():
            self._settle(self._upload)
        if time.monotonic() - self._uploaded_s > _UPLOAD_INTERVAL_S:
            self._start()

    def _sync(self) -> None:
        if self._upload is not None:
            with contextlib.suppress(OSError):  # tried again right here
                self._settle(self._upload)
        if upload := self._start():
            self._settle(upload)

    def _start(self) -> Future[Any] | None:
        if self._upload is None and self._written < len(self._lines):
            self._uploading, self._uploaded_s = len(self._lines), time.monotonic()
            path = part_path(self._run_dir, self._log, self._number)
            data = b"".join(self._lines)
            self._upload = self._uploader.submit(path.write_bytes, data)
        return self._upload

    def _settle(self, upload: Future[Any]) -> None:
        """Wait for an upload; what was not uploaded will go with the next one."""
        self._upload = None
        try:
            upload.result()
        except Exception as error:  # each store has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from error
        self._written = self._uploading
        self._next_if_full()

    def _next_if_full(self) -> None:
        if sum(map(len, self._lines[: self._written])) >= _PART_BYTES:
            del self._lines[: self._written]
            self._number, self._written = self._number + 1, 0

    def _close(self) -> None:
        self._uploader.shutdown()


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
