"""Encode the units of an input into parts, in any number of processes.

A part depends on its task and the settings alone, and appears complete or not at all.
Therefore tasks may run in any order, and after an attempt is killed, the next one
reuses the parts that exist.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import BinaryIO, NamedTuple

import tiktoken

from data.errors import DataError
from data.storage import created_atomically
from data.text.documents import read_documents
from data.text.files import Unit
from data.text.plain_text import TEXT
from data.text.records import BadRecord, Record
from data.text.streams import line_number
from data.token_store.parts import EncodingSettings, SegmentBuilder

log = logging.getLogger(__name__)

FORMAT = 1  # the version of parts and of encoding; older parts are not reused
# The minimum size of a task, and roughly the maximum number of tasks. Tasks are small
# enough to keep all workers busy to the end, and few enough for their parts to be files
# of one folder.
_TASK_BYTES = 2**22
_MAX_TASKS = 2**16
_SEGMENT_BYTES = 2**24


class Task(NamedTuple):
    """Units that are encoded into one part."""

    units: tuple[Unit, ...]
    size: int  # in bytes of files


def make_tasks(units: list[Unit]) -> list[Task]:
    """Group neighbouring units into tasks of at least `_TASK_BYTES` or 4096 units."""
    min_size = max(_TASK_BYTES, sum(unit.num_bytes for unit in units) // _MAX_TASKS)
    tasks = []
    group = []
    size = 0
    for unit in units:
        group.append(unit)
        size += unit.num_bytes
        if size >= min_size or len(group) >= 4096:
            tasks.append(Task(tuple(group), size))
            group = []
            size = 0
    return [*tasks, Task(tuple(group), size)] if group else tasks


def encoded_part_path(folder: Path, task: Task, settings: EncodingSettings) -> Path:
    """Return the path of a task's part, named by a hash of all that determines it.

    `skip_bad` is left out of the hash, so that parts are reused after it changes. If it
    is false, `build_store` raises DataError for a part with skipped records.
    """
    settings = replace(settings, skip_bad=False)
    units = [asdict(unit) for unit in task.units]
    for values, unit in zip(units, task.units, strict=True):
        values["file"]["format"] = unit.file.format.name
    identity = [FORMAT, asdict(settings), units]
    text = json.dumps(identity, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.part"


def encode_tasks(
    tasks: list[Task],
    folder: Path,
    settings: EncodingSettings,
    encoding: tiktoken.Encoding,
    workers: int,
    report: Callable[[int, int], None] = lambda num_bytes, num_tokens: None,
) -> None:
    """Encode every task whose part is not in `folder` yet.

    With one worker or at most one remaining task, the calling process encodes. `report`
    is regularly called with the number of bytes done, including those of earlier
    attempts, and the number of tokens encoded by this call. Raises DataError if a file
    cannot be read. If bad records may not be skipped, the first one raises a DataError
    that names its file and line.
    """
    pending_tasks = []
    earlier_bytes = 0
    for task in tasks:
        if encoded_part_path(folder, task, settings).exists():
            earlier_bytes += task.size
        else:
            pending_tasks.append(task)
    if num_done := len(tasks) - len(pending_tasks):
        log.info("%d of %d parts were encoded before", num_done, len(tasks))
    context = multiprocessing.get_context("spawn")
    counters = context.Value("q", 0), context.Value("q", 0)
    if workers == 1 or len(pending_tasks) <= 1:
        encoder = _Encoder(folder, settings, encoding, counters)
        for task in pending_tasks:
            encoder.encode(task)
            report(earlier_bytes + counters[0].value, counters[1].value)
        return
    other_children = {*multiprocessing.active_children()}
    arguments = folder, settings, encoding, counters
    pool = ProcessPoolExecutor(
        min(workers, len(pending_tasks)), context, _start_worker, arguments
    )
    try:
        futures = {pool.submit(_encode_in_worker, task) for task in pending_tasks}
        while futures:
            completed, futures = wait(futures, 0.5, FIRST_COMPLETED)
            for future in completed:
                future.result()
            report(earlier_bytes + counters[0].value, counters[1].value)
    except BaseException as error:
        for worker in {*multiprocessing.active_children()} - other_children:
            worker.kill()  # otherwise `shutdown` waits for its task
        if not isinstance(error, BrokenProcessPool):
            raise
        raise DataError(
            f"{folder}: a worker process died, perhaps for lack of memory. The same "
            f"command continues; try fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    """Encodes tasks; `counters` count the bytes and tokens done by all processes."""

    def __init__(
        self,
        folder: Path,
        settings: EncodingSettings,
        encoding: tiktoken.Encoding,
        counters: tuple[Synchronized, Synchronized],
    ):
        self._folder = folder
        self._settings = settings
        self._encoding = encoding
        self._num_bytes, self._num_tokens = counters

    def encode(self, task: Task) -> None:
        path = encoded_part_path(self._folder, task, self._settings)
        segment = SegmentBuilder(self._encoding, self._settings.validation)
        try:
            with created_atomically(path) as partial, partial.open("wb") as file:
                for unit in task.units:
                    self._add(unit, segment, file)
                segment.write(file)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be written ({error}). Free space there, or name "
                f"another place: data.cache_dir of python -m train, work_dir of "
                f"python -m data.prepare"
            ) from error

    def _add(self, unit: Unit, segment: SegmentBuilder, file: BinaryIO) -> None:
        """Add a unit's records to a segment, which is written whenever it is full."""
        is_text = unit.file.format == TEXT
        is_first = not is_text or unit.start == unit.low
        # The reader may read more or fewer bytes than the unit has, because the last
        # record may end in the next unit. The final call reports the difference.
        remaining_bytes = unit.num_bytes

        def progress(num_bytes: int) -> None:
            nonlocal remaining_bytes
            remaining_bytes -= num_bytes
            _add_to(self._num_bytes, num_bytes)

        for record in read_documents(unit, self._settings.reading, progress):
            if isinstance(record, BadRecord) and not self._settings.skip_bad:
                raise _bad_record_error(record)
            _add_to(self._num_tokens, segment.add(record, unit, is_first))
            if is_text and isinstance(record, Record) and record.text:
                is_first = False
            if segment.size >= _SEGMENT_BYTES:
                segment.write(file)
        progress(remaining_bytes)


def _add_to(counter: Synchronized, increment: int) -> None:
    with counter.get_lock():
        counter.value += increment


_encoder: _Encoder | None = None  # set in worker processes only


def _start_worker(
    folder: Path,
    settings: EncodingSettings,
    encoding: tiktoken.Encoding,
    counters: tuple[Synchronized, Synchronized],
) -> None:
    global _encoder
    logging.disable(logging.INFO)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # no process is left to use the result

    threading.Thread(target=end_with_parent, daemon=True).start()
    _encoder = _Encoder(folder, settings, encoding, counters)


def _encode_in_worker(task: Task) -> None:
    assert _encoder is not None
    _encoder.encode(task)


def _bad_record_error(bad: BadRecord) -> DataError:
    """Return the error for a bad record, with its file and line."""
    unit, _, number = bad.location.partition(" ")
    location = bad.location
    hint = ", read another field (text_field=...), or read the file as text "
    hint += "(format=text); in training, these keys have the prefix data."
    if unit == "byte":
        location = f"line {line_number(bad.file, int(number))} ({location})"
    if bad.file.format == TEXT:
        hint = ""
    return DataError(
        f"{bad.file.path}, {location}: {bad.reason}. Repair it, leave it out with "
        f"on_error=skip (data.on_error in training){hint}"
    )
