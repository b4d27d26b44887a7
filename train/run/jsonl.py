"""Write logs of JSON lines, to a disk or an object store, that survive failures.

A log named `metrics` is the file `metrics.jsonl`, followed by the numbered parts
`metrics/1.jsonl`, `metrics/2.jsonl`, ...; readers (jsonl_reader.py) accept either or
both. On a local disk the newest file grows; when `append` returns, the operating system
has the line. Objects under `gs://` or `s3://` cannot grow. There, a thread uploads the
newest part again with all its lines, at most once a minute. Once a part has 1 MiB, the
next one begins.

`append` never raises. If a disk is full or a network fails, up to 10,000 lines wait in
memory until they can be written. No line is torn, duplicated or out of order. Only
`flush` raises; once it returns, all lines survive the loss of this machine.
"""

import abc
import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from data.storage import AppendedFile, is_remote, is_taken, write_atomically
from train.records import json_compatible
from train.run.jsonl_reader import (
    IsRow,
    Row,
    complete_lines,
    log_part,
    part_paths,
)

_MAX_LINES = 10_000  # lines that wait in memory
_PART_BYTES = 2**20
_UPLOAD_INTERVAL_S = 60.0

log = logging.getLogger(__name__)


class Appender(abc.ABC):
    """An open log, which accepts rows from any thread."""

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._warned = False
        # The newest lines. The first `_num_written` of them have been written.
        self._lines: list[bytes] = []
        self._num_written = 0
        self._closed = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row now or as soon as possible; non-finite values become null."""
        with self._lock:
            if self._closed:
                return
            try:
                is_full = len(self._lines) - self._num_written >= _MAX_LINES
                if not is_full:
                    line = json.dumps(json_compatible(row), allow_nan=False)
                    self._lines.append(line.encode() + b"\n")
                self._write()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%s cannot be written: %s; up to %d lines wait in memory "
                        "until it can, further ones are lost",
                        *(self._name, error, _MAX_LINES),
                    )

    def flush(self) -> None:
        """Make all lines survive the loss of this machine.

        Raises:
            OSError: the lines cannot be stored now.
        """
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Write the remaining lines if possible; later rows are ignored."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._sync()
            except OSError as error:
                num_lost = len(self._lines) - self._num_written
                log.error("%s lacks its last %d lines: %s", self._name, num_lost, error)
            self._close()

    @abc.abstractmethod
    def _write(self) -> None: ...

    @abc.abstractmethod
    def _sync(self) -> None: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


def open_lines(
    run_dir: epath.Path | Path,
    name: str,
    keep: Callable[[Row], bool] = lambda row: True,
    is_row: IsRow = lambda row: True,
) -> Appender:
    """Open a log for more rows, after removing torn lines and rows that `keep` rejects.

    The run's directory, local or remote, is made if missing. `keep` may reject only the
    newest rows, because files before the newest kept row are not read. If other lines
    are damaged, a warning counts them, and a copy of the original file is kept.

    Raises:
        OSError: the log cannot be read or written.
    """
    run_dir = epath.Path(run_dir)
    remote = is_remote(run_dir)
    parts = part_paths(run_dir, name)
    lines: list[bytes] = []
    # The newest file is filtered first, so that a kill in between leaves no gap.
    for number, path in sorted(parts.items(), reverse=True):
        if _filter_file(path, keep, is_row):
            # _ObjectAppender uploads the whole newest part again.
            lines = [line for line, _ in complete_lines(path, is_row)] if remote else []
            break
        del parts[number]
    number = max(parts, default=int(remote))
    if remote:
        return _ObjectAppender(run_dir, name, number, lines)
    path = Path(log_part(run_dir, name, number))
    path.parent.mkdir(parents=True, exist_ok=True)
    return _FileAppender(path)


def _filter_file(path: epath.Path, keep: Callable[[Row], bool], is_row: IsRow) -> bool:
    """Drop all lines but kept rows, atomically; return False if this empties the file.

    An empty file is deleted. If a file with damaged lines cannot be rewritten, these
    lines stay; if it is local, everything after the last kept row is dropped. A link is
    replaced by a file, because its target may belong to something else.
    """
    can_cut = not (is_remote(path) or Path(path).is_symlink())
    offset = kept_end = kept_bytes = num_damaged = 0
    for line, row in complete_lines(path, is_row):
        offset += len(line)
        num_damaged += row is None
        if row is not None and keep(row):
            kept_bytes = kept_bytes + len(line)
            kept_end = offset
    copies = (path.parent / f"{path.name}.damaged-{n}" for n in itertools.count(1))
    damaged_copy = next(file for file in copies if not is_taken(file))
    try:
        if num_damaged:
            path.copy(damaged_copy)
        if not kept_bytes:
            path.unlink()
        elif kept_bytes == kept_end and can_cut:
            os.truncate(path, kept_end)  # works on a full disk
        elif kept_bytes < path.stat().length:
            rows = complete_lines(path, is_row)
            kept_lines = (line for line, row in rows if row is not None and keep(row))
            write_atomically(path, kept_lines)
    except OSError as error:
        if not num_damaged:
            raise
        damaged_copy.unlink(missing_ok=True)
        message = "%s: %d lines are damaged. They stay where they are, because the file"
        message += " cannot be rewritten (%s); all readers skip them"
        log.warning(message, path, num_damaged, error)
        if can_cut:
            os.truncate(path, kept_end)
        return True
    if num_damaged:
        message = "%s: %d lines are damaged and are left out of curves and reports. "
        message += "The original file is kept as %s"
        log.warning(message, path, num_damaged, damaged_copy)
    return kept_bytes > 0


class _FileAppender(Appender):
    """Appends to a local file. `_lines` holds the lines since the last `sync`."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._file = AppendedFile(path)

    def _write(self) -> None:
        for line in self._lines[self._num_written :]:
            self._file.append(line)
            self._num_written += 1
        if self._num_written >= _MAX_LINES:
            self._sync()

    def _sync(self) -> None:
        if self._num_written < len(self._lines):
            self._write()
        try:
            self._file.sync()
        except OSError:  # the failed sync has removed the lines: write them again
            self._num_written = 0
            raise
        self._lines = []
        self._num_written = 0

    def _close(self) -> None:
        self._file.close()


class _ObjectAppender(Appender):
    """Uploads parts to an object store. `_lines` holds the lines of the newest part."""

    def __init__(self, run_dir: epath.Path, name: str, number: int, lines: list[bytes]):
        super().__init__(f"{run_dir}/{name}")
        self._run_dir = run_dir
        self._log_name = name
        self._number = number
        self._lines = lines
        self._num_written = len(lines)
        self._begin_part_if_full()
        self._upload_began_s = time.monotonic()
        self._uploader = ThreadPoolExecutor(1, "upload")
        self._upload: Future[Any] | None = None
        self._num_uploading = 0  # lines in flight

    def _write(self) -> None:
        if self._upload is not None and self._upload.done():
            self._finish_upload(self._upload)
        if time.monotonic() - self._upload_began_s > _UPLOAD_INTERVAL_S:
            self._start_upload()

    def _sync(self) -> None:
        if self._upload is not None:
            with contextlib.suppress(OSError):  # the upload is tried again below
                self._finish_upload(self._upload)
        if upload := self._start_upload():
            self._finish_upload(upload)

    def _start_upload(self) -> Future[Any] | None:
        if self._upload is None and self._num_written < len(self._lines):
            self._num_uploading = len(self._lines)
            self._upload_began_s = time.monotonic()
            path = log_part(self._run_dir, self._log_name, self._number)
            data = b"".join(self._lines)
            self._upload = self._uploader.submit(path.write_bytes, data)
        return self._upload

    def _finish_upload(self, upload: Future[Any]) -> None:
        """Wait for an upload; if it fails, the next upload includes its lines."""
        self._upload = None
        try:
            upload.result()
        except Exception as error:  # each store raises its own errors
            raise OSError(f"{type(error).__name__}: {error}") from error
        self._num_written = self._num_uploading
        self._begin_part_if_full()

    def _begin_part_if_full(self) -> None:
        if sum(map(len, self._lines[: self._num_written])) >= _PART_BYTES:
            del self._lines[: self._num_written]
            self._number = self._number + 1
            self._num_written = 0

    def _close(self) -> None:
        self._uploader.shutdown()
