"""Read tables of text (csv, tsv), one row at a time."""

import csv
from collections.abc import Iterator
from typing import Any

from data.config import FormatName
from data.text import records
from data.text.files import Format, Unit
from data.text.records import BadRecord, ReadSettings, Records, document_of_values
from data.text.streams import Stream

_BOM = b"\xef\xbb\xbf"


def read_csv(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the rows of a table, whose first line names the columns.

    Fields are separated by the comma, tab or semicolon by which the first line names
    the columns that are read. A field may be quoted, and then hold line ends.
    """
    file = unit.file
    lines = _Lines(stream, settings.max_record_bytes)
    wanted = settings.fields
    if not (header_line := lines.peek()) and stream.damage is None:
        return
    headers = [(d, next(csv.reader([header_line], delimiter=d), [])) for d in ",\t;"]
    delimiter, names = max(headers, key=lambda pair: len({*wanted} & {*pair[1]}))
    if missing := [name for name in wanted if name not in names]:
        _, names = max(headers, key=lambda pair: len(pair[1]))
        columns = ", ".join(names[:8])
        reason = f"no column {missing[0]!r} among those of the first line: {columns}"
        yield BadRecord(file, "byte 0", reason)
        return
    csv.field_size_limit(settings.max_record_bytes)
    # Without `strict`, a stray quote would make one field of many rows.
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    indices = [names.index(name) for name in wanted]
    is_header = True
    while True:
        location = f"byte {lines.num_bytes}"
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            is_header = False
            yield BadRecord(file, location, f"no row of a table: {error}")
            continue
        if stream.damage is not None and not lines.is_complete:
            break
        if is_header or not row:
            is_header = False
        elif len(row) != len(names):
            counts = f"{len(row)} fields, but the first line names {len(names)} columns"
            yield BadRecord(file, location, f"no row of a table: {counts}")
        else:
            values: list[Any] = [
                row[i].encode("utf-8", "surrogateescape") for i in indices
            ]
            if settings.id_field:
                values[-1] = row[indices[-1]] or None
            yield document_of_values(file, location, values, settings)
    if stream.damage is not None:
        reason = f"cannot be read further: {stream.damage}"
        yield BadRecord(file, location, reason)


class _Lines(Iterator[str]):
    """The lines of a stream; a line that is too long raises csv.Error."""

    def __init__(self, stream: Stream, limit: int):
        self.num_bytes = 0  # before the next line
        self.is_complete = True  # whether the last line ended with a newline
        self._file = stream.file
        self._limit = limit
        self._first: bytes | None = None

    def peek(self) -> str:
        """Return the first line, without consuming it."""
        line: bytes = self._file.readline(self._limit + 1)
        self._first = line
        return _decoded(line.removeprefix(_BOM))

    def __next__(self) -> str:
        line, self._first = self._first, None
        if line is None:
            line = self._file.readline(self._limit + 1)
        if not line:
            raise StopIteration
        text = _decoded(line.removeprefix(_BOM if self.num_bytes == 0 else b""))
        self.num_bytes += len(line)
        self.is_complete = line.endswith(b"\n")
        if len(line) <= self._limit or line.endswith(b"\n"):
            return text
        while not line.endswith(b"\n") and (line := self._file.readline(2**20)):
            self.num_bytes += len(line)
        reason = records.too_long_reason(self._limit + 1, self._limit)
        raise csv.Error(f"at least {reason}")


def _decoded(line: bytes) -> str:
    # An invalid byte becomes half a surrogate pair, of which `read_csv` makes the byte.
    return line.decode("utf-8", "surrogateescape")


CSV = Format(
    name=FormatName.csv,
    kind="csv tables",
    read=read_csv,
    description="csv and tsv",
    suffixes=(".csv", ".tsv"),
)
