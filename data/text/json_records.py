"""Read records of JSON: one in each line, an array, or one after the other."""

import codecs
import json
import re
from typing import Any

from data.text import records
from data.text.files import File, Unit
from data.text.records import (
    BadRecord,
    ReadSettings,
    Record,
    Records,
    document_of_fields,
)
from data.text.streams import Stream

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 2**16
_SPACE = re.compile(r"[ \t\r\n]*")


def read_lines(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the records of the lines that start inside the unit."""
    lines = stream.file
    limit = settings.max_record_bytes

    def skip_line() -> int:
        size = 0
        while chunk := lines.readline(2**20):
            size += len(chunk)
            if chunk.endswith(b"\n"):
                break
        return size

    offset = 0
    if unit.start:
        # Skip the rest of a line that began in the previous unit. If a line begins at
        # unit.start, starting one byte early skips only the newline before it.
        offset = stream.seek(unit.start - 1) + skip_line()
    while unit.stop is None or offset < unit.stop:
        line = lines.readline(limit + 1)
        start = offset
        is_complete = line.endswith(b"\n")
        offset += len(line)
        if len(line) > limit and not is_complete:
            offset += skip_line()
            reason = records.too_long_reason(offset - start, limit)
            yield BadRecord(unit.file, f"byte {start}", reason)
        elif stream.damage is not None and not is_complete:
            reason = f"cannot be read further: {stream.damage}"
            yield BadRecord(unit.file, f"byte {start}", reason)
            return
        elif not line:
            return
        elif (line := line.removeprefix(_BOM if start == 0 else b"")).strip():
            yield _parse_line(unit.file, f"byte {start}", line, settings)


def _parse_line(
    file: File, location: str, line: bytes, settings: ReadSettings
) -> Record | BadRecord:
    """Parse one line of JSON."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return BadRecord(file, location, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRecord(file, location, f"no JSON: {error}")
    return document_of_fields(file, location, value, settings)


def read_json(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the records of an array, or records that follow each other.

    After text that is no JSON, nothing more can be read.
    """
    file = unit.file
    values = _Values(stream, settings.max_record_bytes)
    if is_array := values.peek() == "[":
        values.skip()
    is_first = True
    while (character := values.peek()) and character != "]":
        location = f"byte {values.num_bytes}"
        if is_array and not is_first:
            if character != ",":
                yield BadRecord(file, location, "no JSON: a comma is missing")
                return
            values.skip()
            if not values.peek():
                break
            location = f"byte {values.num_bytes}"
        is_first = False
        try:
            value = values.take()
        except (ValueError, RecursionError) as error:
            if stream.damage is None:
                reason = f"cannot be read further: {error}"
                yield BadRecord(file, location, reason)
                return
            break
        yield document_of_fields(file, location, value, settings)
    if is_array and character == "]":
        values.skip()
        character = values.peek()
        is_array = False
    location = f"byte {values.num_bytes}"
    if stream.damage is not None:
        yield BadRecord(file, location, f"cannot be read further: {stream.damage}")
    elif is_array:
        yield BadRecord(file, location, "no JSON: the array does not end")
    elif character:
        yield BadRecord(file, location, "no JSON: text follows the records")


class _Values:
    """Values of JSON that are parsed one after the other in bounded memory."""

    def __init__(self, stream: Stream, limit: int):
        self.num_bytes = 0  # before the next character
        self._stream = stream
        self._limit = limit
        # An invalid byte becomes half a surrogate pair, which no document may hold.
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text = ""
        self._index = 0
        self._has_ended = False
        self._read(_BLOCK_BYTES)
        if self._text.startswith("\ufeff"):
            self.skip()

    def peek(self) -> str:
        """Return the next character that is not white space, or "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._index)
            assert space is not None
            self.skip(len(space[0]))
            if self._index < len(self._text) or self._has_ended:
                return self._text[self._index : self._index + 1]
            self._read(_BLOCK_BYTES)

    def skip(self, count: int = 1) -> None:
        """Skip characters that were read."""
        skipped = self._text[self._index : self._index + count]
        self._index += count
        self.num_bytes += len(skipped.encode("utf-8", "surrogateescape"))

    def take(self) -> Any:
        """Parse the next value, or raise ValueError or RecursionError."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._index)
                if end < len(self._text) or self._has_ended:  # a number may go on
                    self.skip(end - self._index)
                    return value
            except ValueError as error:
                if self._has_ended:
                    raise ValueError(f"no JSON: {error}") from None
            size = len(self._text) - self._index
            if size > self._limit:
                raise ValueError(records.too_long_reason(size, self._limit))
            self._read(max(_BLOCK_BYTES, size))

    def _read(self, count: int) -> None:
        data = self._stream.take(count)
        self._has_ended = not data
        more = self._decode(data, final=self._has_ended)
        self._text = self._text[self._index :] + more
        self._index = 0
