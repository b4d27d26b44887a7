"""Encode the units of an input into parts, in any number of processes.

A part is a function of its task alone, and appears whole or not at all. So tasks may
run in any order and be killed: what is there need not be done again.
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
from data.text.files import Format, Unit
from data.text.records import Bad, Record
from data.text.streams import line_number
from data.token_store.parts import EncodingSettings, SegmentBuilder

log = logging.getLogger(__name__)

FORMAT = 1  # version of the parts, and of the way in which text becomes tokens
# The least bytes of a task, and roughly the largest number of tasks: enough to keep
# all workers busy to the end, and few enough files for one folder.
_TASK_BYTES, _MOST_TASKS = 2**22, 2**16
_SEGMENT_BYTES = 2**24


class Task(NamedTuple):
    """Units that become one part."""

    units: tuple[Unit, ...]
    size: int  # bytes of files


def make_tasks(units: list[Unit]) -> list[Task]:
    """Group neighbouring units until a task is worth a process' while."""
    enough = max(_TASK_BYTES, sum(unit.num_bytes for unit in units) // _MOST_TASKS)
    tasks, group, size = [], [], 0
    for unit in units:
        group.append(unit)
        size += unit.num_bytes
        if size >= enough or len(group) >= 4096:
            tasks.append(Task(tuple(group), size))
            group, size = [], 0
    return [*tasks, Task(tuple(group), size)] if group else tasks


def encoded_part_path(folder: Path, task: Task, settings: EncodingSettings) -> Path:
    """Name a task's part by all that decides its content.

    Whether bad records may be skipped does not: where none may be, there is none.
    """
    settings = replace(settings, skip_bad=False)
    identity = [FORMAT, asdict(settings), [asdict(unit) for unit in task.units]]
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
    """Make every part in `folder` that is not there yet.

    With one worker, or one task left, all is done in this process. `report` gets now
    and then the bytes of the files that are done, and the tokens encoded just now.
    Raises DataError if a file cannot be read, or for the first bad record, by file and
    line, unless they are skipped.
    """
    pending, done = [], 0
    for task in tasks:
        if encoded_part_path(folder, task, settings).exists():
            done += task.size
        else:
            pending.append(task)
    if num_done := len(tasks) - len(pending):
        log.info("%d of %d parts were encoded before", num_done, len(tasks))
    context = multiprocessing.get_context("spawn")
    counts = context.Value("q", 0), context.Value("q", 0)
    if workers == 1 or len(pending) <= 1:
        encoder = _Encoder(folder, settings, encoding, counts)
        for task in pending:
            encoder.encode(task)
            report(done + counts[0].value, counts[1].value)
        return
    running = {*multiprocessing.active_children()}
    arguments = folder, settings, encoding, counts
    pool = ProcessPoolExecutor(
        min(workers, len(pending)), context, _start_worker, arguments
    )
    try:
        waiting = {pool.submit(_work, task) for task in pending}
        while waiting:
            ended, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
            for future in ended:
                future.result()
            report(done + counts[0].value, counts[1].value)
    except BaseException as error:
        for worker in {*multiprocessing.active_children()} - running:
            worker.kill()  # it may be in the middle of a large file
        if not isinstance(error, BrokenProcessPool):
            raise
        raise DataError(
            f"{folder}: a worker process died, perhaps for want of memory. The same "
            f"command continues; try fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    """Encodes tasks; `counts` are the files' bytes and the tokens done by all."""

    def __init__(
        self,
        folder: Path,
        settings: EncodingSettings,
        encoding: tiktoken.Encoding,
        counts: tuple[Synchronized, Synchronized],
    ):
        self._folder, self._settings, self._encoding = folder, settings, encoding
        self._num_bytes, self._num_tokens = counts

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
        is_text = unit.file.format is Format.text
        complete = not is_text or unit.start == unit.low
        # A unit's ends lie elsewhere than its records', but the sum is the files'.
        expected = unit.num_bytes

        def progress(num_bytes: int) -> None:
            nonlocal expected
            expected -= num_bytes
            _add_to(self._num_bytes, num_bytes)

        for record in read_documents(unit, self._settings.reading, progress):
            if isinstance(record, Bad) and not self._settings.skip_bad:
                raise _bad_record(record)
            _add_to(self._num_tokens, segment.add(record, unit, complete))
            if is_text and isinstance(record, Record) and record.text:
                complete = False
            if segment.size >= _SEGMENT_BYTES:
                segment.write(file)
        progress(expected)


def _add_to(count: Synchronized, more: int) -> None:
    with count.get_lock():
        count.value += more


_encoder: _Encoder | None = None  # the one of this worker process


def _start_worker(
    folder: Path,
    settings: EncodingSettings,
    encoding: tiktoken.Encoding,
    counts: tuple[Synchronized, Synchronized],
) -> None:
    global _encoder
    logging.disable(logging.INFO)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # no process is left to read the result

    threading.Thread(target=end_with_parent, daemon=True).start()
    _encoder = _Encoder(folder, settings, encoding, counts)


def _work(task: Task) -> None:
    assert _encoder is not None
    _encoder.encode(task)


def _bad_record(bad: Bad) -> DataError:
    """Return the error of a record that may not be skipped, by file and line."""
    unit, _, number = bad.place.partition(" ")
    place, field = bad.place, ", or read another field (text_field=...)"
    if unit == "byte":
        place = f"line {line_number(bad.file, int(number))} ({place})"
    if bad.file.format is Format.text:
        field = ""
    return DataError(
        f"{bad.file.path}, {place}: {bad.reason}. Repair it, or leave it out with "
        f"on_error=skip (data.on_error in training){field}"
    )
