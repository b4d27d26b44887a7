"""Encode the units of an input into parts, in any number of processes.

A part is a function of its task alone, and appears whole or not at all. So tasks may
run in any order, in any number of processes, and be killed: what is there need not be
done again.
"""

import contextlib
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

from data import tokenizer
from data.errors import DataError
from data.text.documents import read
from data.text.files import Format, Unit
from data.text.records import Bad, Record
from data.text.streams import line_numbers
from data.token_store.parts import EncodingSettings, SegmentBuilder
from data.token_store.storage import written_whole

log = logging.getLogger(__name__)

FORMAT = 1  # of parts; and of how text becomes tokens
# A task is at least this much of the input, and there are not many more than this
# many: enough to keep all workers busy to the end, few enough for a folder.
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


def part_path(folder: Path, task: Task, settings: EncodingSettings) -> Path:
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
    workers: int,
    report: Callable[[int, int], None] = lambda size, tokens: None,
) -> None:
    """Make every part that is not there yet.

    Args:
        tasks: what to encode.
        folder: where parts lie.
        settings: what decides their content.
        workers: processes; with 1, or one task, all is done in this one.
        report: told now and then how many bytes of the files are done, and how many
            tokens came of those that were not done before.

    Raises:
        DataError: a file cannot be read; or, unless bad records are skipped, the
            first one met, by file and line.
    """
    left = [task for task in tasks if not part_path(folder, task, settings).exists()]
    if len(left) < len(tasks):
        there = len(tasks) - len(left)
        log.info("%d of %d parts were encoded before", there, len(tasks))
    done = sum(task.size for task in tasks) - sum(task.size for task in left)
    if workers == 1 or len(left) <= 1:
        encoder = _Encoder(folder, settings)
        for task in left:
            encoder.encode(task)
            report(done + encoder.size, encoder.tokens)
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0), context.Value("q", 0)
    pool = ProcessPoolExecutor(
        min(workers, len(left)), context, _start_worker, (folder, settings, shared)
    )
    try:
        waiting = {pool.submit(_work, task) for task in left}
        while waiting:
            ended, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
            for future in ended:
                future.result()
            report(done + shared[0].value, shared[1].value)
    except BrokenProcessPool as error:
        raise DataError(
            f"{folder}: a worker process died, perhaps for want of memory. The same "
            f"command continues; try fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    """Encodes tasks, and counts the files' bytes and the tokens it has done.

    A pool's workers add up what they count in shared memory.
    """

    def __init__(
        self,
        folder: Path,
        settings: EncodingSettings,
        shared: tuple[Synchronized | None, Synchronized | None] = (None, None),
    ):
        self._folder, self._settings, self._shared = folder, settings, shared
        self._encoding = tokenizer.load_tokenizer(
            settings.tokenizer, settings.tokenizer_sha256
        )
        self.size = self.tokens = 0

    def encode(self, task: Task) -> None:
        """Make a task's part."""
        path = part_path(self._folder, task, self._settings)
        try:
            with written_whole(path) as partial, partial.open("wb") as file:
                segment = self._new_segment()
                for unit in task.units:
                    segment = self._encode_unit(unit, segment, file)
                segment.write(file)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be written ({error}). Free space there, or name "
                f"another place with work_dir"
            ) from error

    def _encode_unit(
        self, unit: Unit, segment: SegmentBuilder, file: BinaryIO
    ) -> SegmentBuilder:
        """Add a unit's records to a segment; return the one that goes on."""
        size_before, is_text = self.size, unit.file.format is Format.text
        whole = not is_text or unit.start == unit.low
        for record in read(unit, self._settings.reading, self._count):
            if isinstance(record, Bad) and not self._settings.skip_bad:
                raise DataError(
                    f"{complaint(record)}. Mend it, or leave such records out with "
                    f"on_error=skip"
                )
            self._count(0, segment.add(record, unit, whole))
            if is_text and isinstance(record, Record) and record.text:
                whole = False
            if segment.size >= _SEGMENT_BYTES:
                segment.write(file)
                segment = self._new_segment()
        # A unit's ends lie elsewhere than its records', but the sum is the files'.
        self._count(unit.num_bytes - (self.size - size_before))
        return segment

    def _new_segment(self) -> SegmentBuilder:
        return SegmentBuilder(self._encoding, self._settings.validation)

    def _count(self, size: int, tokens: int = 0) -> None:
        self.size += size
        self.tokens += tokens
        for shared, more in zip(self._shared, (size, tokens), strict=True):
            if shared is not None and more:
                with shared.get_lock():
                    shared.value += more


_encoder: _Encoder | None = None  # of a worker process


def _start_worker(
    folder: Path,
    settings: EncodingSettings,
    shared: tuple[Synchronized, Synchronized],
) -> None:
    global _encoder
    logging.disable(logging.INFO)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # nobody is left to read what it would give

    threading.Thread(target=end_with_parent, daemon=True).start()
    _encoder = _Encoder(folder, settings, shared)


def _work(task: Task) -> None:
    assert _encoder is not None
    _encoder.encode(task)


def complaint(bad: Bad) -> str:
    """Describe a bad record, by file and line."""
    place = bad.place
    with contextlib.suppress(OSError, ValueError):
        if place.startswith("byte "):
            (line,) = line_numbers(bad.file, [int(place.removeprefix("byte "))])
            place = f"line {line} ({place})"
    return f"{bad.file.path}, {place}: {bad.reason}"
