"""JSON lines that survive kills, full disks and object stores.

A log named `metrics` is `metrics.jsonl`, and after it the parts `metrics/1.jsonl`,
`metrics/2.jsonl`, ... Readers take what there is of both. On a local disk the newest
file grows, and a line is with the operating system when `append` returns. Objects under
`gs://` or `s3://` cannot grow: there the newest part is uploaded whole, in the
background and at most once a minute, and from 1 MiB on the next part begins.

`append` never raises. What a full disk or a dead network does not take waits in memory,
up to 10,000 lines, and is written once it can be; no line is torn, written twice or out
of order. Only `flush` raises: after it all lines outlive this machine.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from train.run.appenders import Appender, FileAppender, PartsAppender, part_path

Row = dict[str, Any]

_READERS = 8  # hide a store's latency


def read_rows(run_dir: epath.Path | Path, name: str) -> list[Row]:
    """Return a log's rows in order; torn lines are skipped."""
    with ThreadPoolExecutor(_READERS) as pool:
        parts = pool.map(_read, _parts(run_dir, name).values())
        return [row for data in parts for _, row in _parse(data)]


def newest_rows(run_dir: epath.Path | Path, name: str) -> Iterator[Row]:
    """Yield a log's rows from the newest on, reading no more than is asked for."""
    for path in reversed(_parts(run_dir, name).values()):
        for line in reversed(_read(path).split(b"\n")):
            if (row := _row(line)) is not None:
                yield row


def open_lines(
    run_dir: epath.Path | Path, name: str, keep: Callable[[Row], bool] = lambda _: True
) -> Appender:
    """Open a log to append to it, after dropping torn lines and what is not kept.

    Args:
        run_dir: the run's directory, local or remote; made if missing.
        name: of the log.
        keep: says of a row whether to keep it; those to drop are the newest ones.

    Raises:
        OSError: if it cannot be read or written.
    """
    run_dir = epath.Path(run_dir)
    remote = "://" in os.fspath(run_dir)
    parts = _parts(run_dir, name)
    lines: list[bytes] = []
    # From the end, so that after a kill in between what is left has no gap.
    for number, path in sorted(parts.items(), reverse=True):
        old = path.read_bytes()
        lines = [line for line, row in _parse(old) if keep(row)]
        if lines or number == min(parts):
            _rewrite(path, old, b"".join(lines), remote)
            break
        path.unlink()
        del parts[number]
    number = max(parts, default=int(remote))
    if remote:
        return PartsAppender(run_dir, name, number, lines)
    path = Path(part_path(run_dir, name, number))
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileAppender(path)


def _parts(run_dir: epath.Path | Path, name: str) -> dict[int, epath.Path]:
    """Return the files of a log by number, ascending; the single file is 0."""
    run_dir = epath.Path(run_dir)
    single, folder = part_path(run_dir, name, 0), run_dir / name
    numbers = [0] if single.exists() else []
    if folder.exists():
        names = (path.name.removesuffix(".jsonl") for path in folder.iterdir())
        numbers += sorted(int(name) for name in names if name.isdigit())
    return {number: part_path(run_dir, name, number) for number in numbers}


def _read(path: epath.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # dropped by a start of the run just now
        return b""


def _rewrite(path: epath.Path, old: bytes, new: bytes, remote: bool) -> None:
    """Replace a file's content, whole or not at all."""
    if new == old:
        return
    if remote:  # the upload of one object is atomic by itself
        path.write_bytes(new)
    elif old.startswith(new):  # needs no room on a full disk
        os.truncate(path, len(new))
    else:
        other = Path(f"{path}.tmp")
        with other.open("wb") as file:
            file.write(new)
            file.flush()
            # Else a power cut may leave the new name with nothing in it.
            os.fsync(file.fileno())
        other.replace(path)


def _parse(data: bytes) -> list[tuple[bytes, Row]]:
    """Return the lines of `data` that are JSON objects, each with its object."""
    rows = ((line + b"\n", _row(line)) for line in data.split(b"\n"))
    return [(line, row) for line, row in rows if row is not None]


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
