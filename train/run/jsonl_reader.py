"""Read logs of JSON lines of any size in chunks, and skip torn or damaged lines.

The files of a log, and how they are written: train/run/jsonl.py.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from data.storage import is_remote

Row = dict[str, Any]
IsRow = Callable[[Row], bool]  # whether an object is a line of its log

_READERS = 8  # hide a store's latency
_BLOCK = 2**20  # bytes read at once from the end


def any_row(row: Row) -> bool:
    """Accept every object as a row."""
    return True


def log_part(run_dir: epath.Path, name: str, number: int) -> epath.Path:
    """Return the file of a part; part 0 is the single file."""
    return run_dir / (f"{name}/{number}.jsonl" if number else f"{name}.jsonl")


def part_paths(run_dir: epath.Path | Path, name: str) -> dict[int, epath.Path]:
    """Return the files of a log by number, ascending; 0 is the single file."""
    run_dir = epath.Path(run_dir)
    single, folder = log_part(run_dir, name, 0), run_dir / name
    numbers = [0] if single.exists() else []
    if folder.exists():
        names = (path.name.removesuffix(".jsonl") for path in folder.iterdir())
        numbers += sorted(int(name) for name in names if name.isdigit())
    return {number: log_part(run_dir, name, number) for number in numbers}


def iterate_rows(
    run_dir: epath.Path | Path,
    name: str,
    is_row: IsRow = any_row,
    containing: bytes = b"",
) -> Iterator[Row]:
    """Yield a log's rows in order, reading one line at a time.

    Args:
        run_dir: the run's directory, local or remote.
        name: the name of the log.
        is_row: tells a line of this log from a damaged one.
        containing: lines without these bytes are skipped before parsing.
    """
    for line in _lines(list(part_paths(run_dir, name).values())):
        if containing in line and (row := parse_row(line, is_row)) is not None:
            yield row


def newest_rows(
    run_dir: epath.Path | Path, name: str, is_row: IsRow = any_row
) -> Iterator[Row]:
    """Yield a log's rows, newest first, reading no more than the caller consumes."""
    for path in reversed(part_paths(run_dir, name).values()):
        for line in _lines_from_end(path):
            if (row := parse_row(line, is_row)) is not None:
                yield row


def parse_row(line: bytes, is_row: IsRow) -> Row | None:
    """Return the row that a line holds; None if it is torn or damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_row(row) else None


class Scan(NamedTuple):
    """The content of a log file.

    end: the offset in bytes at which the newest line to keep ends.
    kept_bytes: the number of bytes of all lines to keep.
    num_damaged: the number of complete lines that are not rows.
    """

    end: int
    kept_bytes: int
    num_damaged: int


def scan(path: epath.Path, keep: Callable[[Row], bool], is_row: IsRow) -> Scan:
    """Read a file once, line by line, and count what to keep."""
    offset = end = kept_bytes = num_damaged = 0
    with path.open("rb") as file:
        for line in file:
            offset += len(line)
            row = parse_row(line, is_row) if line.endswith(b"\n") else None
            if row is None:
                num_damaged += line.endswith(b"\n")
            elif keep(row):
                kept_bytes, end = kept_bytes + len(line), offset
    return Scan(end, kept_bytes, num_damaged)


def kept_lines(
    path: epath.Path, keep: Callable[[Row], bool], is_row: IsRow
) -> Iterator[bytes]:
    """Yield the lines of a file that are rows to keep, with their line ends."""
    with path.open("rb") as file:
        for line in file:
            row = parse_row(line, is_row) if line.endswith(b"\n") else None
            if row is not None and keep(row):
                yield line


def _lines(paths: list[epath.Path]) -> Iterator[bytes]:
    """Yield the lines of files; parts in a store are read ahead."""
    if not (paths and is_remote(paths[0])):
        for path in paths:
            try:
                with path.open("rb") as file:
                    yield from file
            except FileNotFoundError:  # a new start of the run has just dropped it
                continue
        return
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(paths), _READERS):
            for data in pool.map(_read, paths[first : first + _READERS]):
                yield from data.split(b"\n")


def _lines_from_end(path: epath.Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    if is_remote(path):  # a part is small
        yield from reversed(_read(path).split(b"\n"))
        return
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, 2)
        pieces: list[
            bytes
        ] = []  # chunks of a line that begins before `end`, last first
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            first, *lines = file.read(end - start).split(b"\n")
            if lines:
                pieces.append(lines.pop())
                yield b"".join(reversed(pieces))
                yield from reversed(lines)
                pieces = []
            pieces.append(first)
            end = start
        yield b"".join(reversed(pieces))


def _read(path: epath.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # a new start of the run has just dropped it
        return b""
