"""Encode units of input into parts: files of tokens that wait to be put together.

A part is a function of its task alone, and appears whole or not at all. So tasks may
run in any order, in any number of processes, and be killed: what is there need not be
done again.

A part is a row of segments, each a few MB of text: for each split its tokens, the
places among them where documents end, and those documents' ids; then what was skipped.
"""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tiktoken

from data import tokenizer
from data.errors import DataError
from data.text.documents import read
from data.text.files import SPLITS, Format, Split, Unit
from data.text.records import Bad, Reading, Record
from data.text.streams import line_numbers

log = logging.getLogger(__name__)

FORMAT = 1  # of parts; and of how text becomes tokens
# A task is at least this much of the input, and there are not many more than this
# many: enough to keep all workers busy to the end, few enough for a folder.
_TASK_BYTES, _MOST_TASKS = 2**22, 2**16
_SEGMENT_BYTES = 2**24


@dataclass(frozen=True)
class Encoding:
    """What decides the tokens of a unit."""

    tokenizer: str
    tokenizer_sha256: str | None
    reading: Reading
    validation: float  # part of the documents, by a hash of their ids
    skip_bad: bool


class Task(NamedTuple):
    """Units that become one part."""

    units: tuple[Unit, ...]
    size: int  # bytes of files


class SegmentSplit(NamedTuple):
    """One split's share of a segment."""

    tokens: np.ndarray  # in the store's dtype
    ends: np.ndarray  # int64: how many tokens lie before the end of each document
    ids: np.ndarray  # uint8: the documents' ids in UTF-8, end to end
    id_ends: np.ndarray  # int64


class Segment(NamedTuple):
    """A few MB of encoded text."""

    splits: dict[Split, SegmentSplit]
    notes: dict[str, Any]  # bytes of each split, empty documents, bad records


def make_tasks(units: list[Unit]) -> list[Task]:
    """Group neighbouring units until a task is worth a process' while."""
    spans = [unit.num_bytes for unit in units]
    enough = max(_TASK_BYTES, sum(spans) // _MOST_TASKS)
    tasks, group, size = [], [], 0
    for unit, span in zip(units, spans, strict=True):
        group.append(unit)
        size += span
        if size >= enough or len(group) >= 4096:
            tasks.append(Task(tuple(group), size))
            group, size = [], 0
    return [*tasks, Task(tuple(group), size)] if group else tasks


def part_path(folder: Path, task: Task, how: Encoding) -> Path:
    """Name a task's part by all that decides its content.

    Whether bad records may be skipped does not: where none may be, there is none.
    """
    how = replace(how, skip_bad=False)
    identity = [FORMAT, asdict(how), [asdict(unit) for unit in task.units]]
    text = json.dumps(identity, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.part"


def encode_tasks(
    tasks: list[Task],
    folder: Path,
    how: Encoding,
    workers: int,
    report: Callable[[int, int], None] = lambda size, tokens: None,
) -> None:
    """Make every part that is not there yet.

    Args:
        tasks: what to encode.
        folder: where parts lie.
        how: what decides their content.
        workers: processes; with 1, or one task, all is done in this one.
        report: told now and then how many bytes of the files are done, and how many
            tokens came of those that were not done before.

    Raises:
        DataError: a file cannot be read; or, unless bad records are skipped, the
            first one met, by file and line.
    """
    left = [task for task in tasks if not part_path(folder, task, how).exists()]
    if len(left) < len(tasks):
        there = len(tasks) - len(left)
        log.info("%d of %d parts were encoded before", there, len(tasks))
    done = sum(task.size for task in tasks) - sum(task.size for task in left)
    if workers == 1 or len(left) <= 1:
        counters = _Counters()
        encoding = tokenizer.load_tokenizer(how.tokenizer, how.tokenizer_sha256)
        for task in left:
            _encode(task, folder, how, encoding, counters)
            report(done + counters.size, counters.tokens)
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0), context.Value("q", 0)
    pool = ProcessPoolExecutor(
        min(workers, len(left)), context, _start_worker, (folder, how, *shared)
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


def read_part(path: Path) -> Iterator[Segment]:
    """Give the segments of a part, in order."""
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            splits: dict[Split, SegmentSplit] = {}
            for split in SPLITS:
                fields = (_load(file) for _ in SegmentSplit._fields)
                splits[split] = SegmentSplit(*fields)
            yield Segment(splits, json.loads(_load(file).tobytes()))


def complaint(bad: Bad) -> str:
    """Say what is wrong where, by file and line."""
    place = bad.place
    with contextlib.suppress(OSError, ValueError):
        if place.startswith("byte "):
            (line,) = line_numbers(bad.file, [int(place.removeprefix("byte "))])
            place = f"line {line} ({place})"
    return f"{bad.file.path}, {place}: {bad.reason}"


class _Counters:
    """What this process has done; a pool's workers add up in shared memory."""

    def __init__(
        self, size: Synchronized | None = None, tokens: Synchronized | None = None
    ):
        self.size = self.tokens = 0
        self._shared = size, tokens

    def add(self, size: int, tokens: int) -> None:
        self.size += size
        self.tokens += tokens
        for shared, more in zip(self._shared, (size, tokens), strict=True):
            if shared is not None and more:
                with shared.get_lock():
                    shared.value += more


_worker: tuple[Path, Encoding, tiktoken.Encoding, _Counters] | None = None


def _start_worker(
    folder: Path, how: Encoding, size: Synchronized, tokens: Synchronized
) -> None:
    global _worker
    logging.disable(logging.INFO)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # nobody is left to read what it would give

    threading.Thread(target=end_with_parent, daemon=True).start()
    encoding = tokenizer.load_tokenizer(how.tokenizer, how.tokenizer_sha256)
    _worker = folder, how, encoding, _Counters(size, tokens)


def _work(task: Task) -> None:
    assert _worker is not None
    folder, how, encoding, counters = _worker
    _encode(task, folder, how, encoding, counters)


def _encode(
    task: Task,
    folder: Path,
    how: Encoding,
    encoding: tiktoken.Encoding,
    counters: _Counters,
) -> None:
    path = part_path(folder, task, how)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            segment = _Building(encoding, how)
            for unit in task.units:
                seen, is_text = counters.size, unit.file.format is Format.text
                whole = not is_text or unit.start == unit.low
                for found in read(unit, how.reading, lambda n: counters.add(n, 0)):
                    if isinstance(found, Bad) and not how.skip_bad:
                        raise DataError(
                            f"{complaint(found)}. Mend it, or leave such records out "
                            f"with on_error=skip"
                        )
                    counters.add(0, segment.add(found, unit, whole))
                    if is_text and isinstance(found, Record) and found.text:
                        whole = False
                    if segment.size >= _SEGMENT_BYTES:
                        segment.write(file)
                        segment = _Building(encoding, how)
                counters.add(unit.num_bytes - (counters.size - seen), 0)
            segment.write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{partial}: cannot be written ({error}). Free space there, or name "
            f"another place with work_dir"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


class _Building:
    """A segment that is being filled."""

    def __init__(self, encoding: tiktoken.Encoding, how: Encoding):
        self._encoding, self._how = encoding, how
        self._dtype = token_dtype(encoding)
        self._tokens: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._counts = dict.fromkeys(SPLITS, 0)
        self._ends: dict[Split, list[int]] = {split: [] for split in SPLITS}
        self._ids: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        self._bytes = dict.fromkeys(SPLITS, 0)
        self._empty, self._bad, self.size = 0, [], 0

    def add(self, found: Record | Bad, unit: Unit, whole: bool) -> int:
        """Encode a record; `whole`: nothing of its document came before it.

        Returns:
            How many tokens it gave.
        """
        if isinstance(found, Bad):
            self._bad.append([found.file.path, found.place, found.reason])
            return 0
        if whole and found.ends and not found.text:
            self._empty += 1
            return 0
        split = unit.split or split_of(found.id, self._how.validation)
        tokens = tokenizer.encode(self._encoding, found.text).astype(self._dtype)
        self._tokens[split].append(tokens)
        count = len(tokens)
        if found.ends and unit.marks_end:
            end = np.array([self._encoding.eot_token], self._dtype)
            self._tokens[split].append(end)
            count += 1
        self._counts[split] += count
        if found.ends:
            self._ends[split].append(self._counts[split])
            self._ids[split].append(found.id.encode())
        self._bytes[split] += len(found.text)
        self.size += len(found.text) + 64
        return count

    def write(self, file: BinaryIO) -> None:
        for split in SPLITS:
            tokens = self._tokens[split]
            ids = self._ids[split]
            joined = np.concatenate(tokens) if tokens else np.zeros(0, self._dtype)
            _save(file, joined)
            _save(file, np.array(self._ends[split], np.int64))
            _save(file, np.frombuffer(b"".join(ids), np.uint8))
            _save(file, np.cumsum([len(name) for name in ids], dtype=np.int64))
        notes = {"bytes": self._bytes, "empty": self._empty, "bad": self._bad}
        _save(file, np.frombuffer(json.dumps(notes).encode(), np.uint8))


def split_of(document: str, validation: float) -> Split:
    """Choose a document's split by a hash of its id, wherever it comes from."""
    digest = hashlib.sha256(document.encode()).digest()
    held_out = int.from_bytes(digest[:8]) / 2**64 < validation
    return "validation" if held_out else "train"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """Give the least dtype that holds every id."""
    return np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")


def _save(file: BinaryIO, array: np.ndarray) -> None:
    np.lib.format.write_array(file, array, allow_pickle=False)


def _load(file: BinaryIO) -> np.ndarray:
    return np.lib.format.read_array(file, allow_pickle=False)
