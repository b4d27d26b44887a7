"""Read logs of JSON lines of any size in chunks, and skip torn or damaged lines.

A log consists of numbered parts, in this order: `<name>.jsonl` (part 0), then
`<name>/<number>.jsonl`. train/run/jsonl.py writes them and describes their format.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from etils import epath

from data.names import numbers_in
from data.storage import is_remote

Row = dict[str, Any]
IsRow = Callable[[Row], bool]  # whether a JSON object is a row of the log

_READERS = 8  # threads that hide a store's latency
_BLOCK = 2**20  # bytes read at once from the end


def log_part(run_dir: epath.Path, name: str, number: int) -> epath.Path:
    """Return the path of part `number` of a log."""
    return run_dir / (f"{name}/{number}.jsonl" if number else f"{name}.jsonl")


def part_paths(run_dir: epath.Path | Path, name: str) -> dict[int, epath.Path]:
    """Return the paths of a log's existing parts by number, ascending."""
    run_dir = epath.Path(run_dir)
    first_part = log_part(run_dir, name, 0)
    folder = run_dir / name
    numbers = [0] if first_part.exists() else []
    if folder.exists():
        parts = (path for path in folder.iterdir() if is_remote(path) or path.is_file())
        numbers += numbers_in(path.name.removesuffix(".jsonl") for path in parts)
    return {number: log_part(run_dir, name, number) for number in numbers}


def iterate_rows(
    run_dir: epath.Path | Path,
    name: str,
    is_row: IsRow = lambda row: True,
    containing: bytes = b"",
) -> Iterator[Row]:
    """Yield a log's rows in order.

    Local files are read line by line, and up to eight whole parts at once from a store.
    `is_row` returns False for a row that is damaged. Lines without the bytes
    `containing` are skipped before they are parsed.
    """
    for line in _iterate_lines(list(part_paths(run_dir, name).values())):
        if containing in line and (row := parse_row(line, is_row)) is not None:
            yield row


def newest_rows(
    run_dir: epath.Path | Path, name: str, is_row: IsRow = lambda row: True
) -> Iterator[Row]:
    """Yield a log's rows, newest first, reading only as far as the caller consumes."""
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


def complete_lines(
    path: epath.Path, is_row: IsRow
) -> Iterator[tuple[bytes, Row | None]]:
    """Yield each complete line with its row, which is None if the line is damaged."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, parse_row(line, is_row)


def _iterate_lines(paths: list[epath.Path]) -> Iterator[bytes]:
    """Yield the lines of files; several parts in a store are read at once."""
    if not (paths and is_remote(paths[0])):
        for path in paths:
            with suppress(FileNotFoundError), path.open("rb") as file:
                yield from file
        return
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(paths), _READERS):
            for data in pool.map(_read, paths[start : start + _READERS]):
                yield from data.split(b"\n")


def _lines_from_end(path: epath.Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    if is_remote(path):  # a part in a store is small
        yield from reversed(_read(path).split(b"\n"))
        return
    with suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, 2)
        partial_line = b""  # a line whose beginning is unread
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            partial_line, *lines = (file.read(end - start) + partial_line).split(b"\n")
            yield from reversed(lines)
            end = start
        yield partial_line


def _read(path: epath.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # a new start of the run has just removed it
        return b""
