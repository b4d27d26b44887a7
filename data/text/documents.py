"""From a unit of input to its documents, in bounded memory.

What cannot be used is a `Bad`, with its place and the reason, and does not hide what
is good before and after it.
"""

import json
from collections.abc import Callable, Iterator

from data.text import files, streams
from data.text.files import File, Format, Unit, unreadable
from data.text.records import Bad, Reading, Record, document, not_utf8, too_long
from data.text.streams import Stream, cut_point, open_stream
from data.text.tables import arrow, parquet

_BOM = b"\xef\xbb\xbf"


def read(
    unit: Unit, how: Reading, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Record | Bad]:
    """Read the documents of a unit.

    Args:
        unit: what to read.
        how: fields and limits.
        progress: told of the bytes of the file that were read, as they are.

    Raises:
        DataError: the file cannot be opened, or a library that it needs is missing.
    """
    readers = {
        Format.text: _text,
        Format.lines: _lines,
        Format.parquet: parquet,
        Format.arrow: arrow,
    }
    try:
        with open_stream(unit.file, progress) as stream:
            yield from readers[unit.file.format](unit, stream, how)
    except (OSError, ValueError, EOFError) as error:
        raise unreadable(unit.file.path, error) from error


def _text(unit: Unit, stream: Stream, how: Reading) -> Iterator[Record | Bad]:
    """Yield running text in pieces of about 4 MiB, cut at ends of lines."""
    broken = None

    def behind_line(at: int) -> int:
        # What lies behind `high` belongs to another split.
        room = streams.CUT_WINDOW if unit.high is None else unit.high - at
        return cut_point(stream.peek(min(streams.CUT_WINDOW, room)))

    at = stream.seek(unit.start)
    if unit.start != unit.low:
        at += stream.skip(behind_line(at))
    while broken is None:
        # Pieces end where units do, so that compressed text gives the same ones.
        target = unit.low + ((at - unit.low) // files.UNIT_BYTES + 1) * files.UNIT_BYTES
        if unit.stop is not None:
            target = min(target, unit.stop)
        pieces = bytearray()
        try:
            pieces += stream.take(max(0, target - at))
            # Looking further is what finds that a compressed file is cut off here.
            last = not stream.peek(1) or target == unit.high
            if not last:
                pieces += stream.take(behind_line(target))
        except EOFError as error:
            pieces += stream.left
            last, broken = True, error
        at += len(pieces)
        text = bytes(pieces)
        bad = None if how.keep_invalid_utf8 else not_utf8(text)
        if bad is not None and broken is not None and bad >= len(text) - 3:
            text = text[:bad]  # the character that it broke off in
        elif bad is not None:
            yield Bad(unit.file, f"byte {at - len(text) + bad}", "not UTF-8")
            text = b""
        if text or last:
            yield Record(unit.file.name, text, last)
        if broken is not None:
            yield Bad(unit.file, f"byte {at}", f"cannot be read further: {broken}")
        if last or (unit.stop not in (None, unit.high) and at >= unit.stop):
            return


def _lines(unit: Unit, stream: Stream, how: Reading) -> Iterator[Record | Bad]:
    """Yield the lines that start inside the unit."""
    lines, limit = stream.file, how.max_record_bytes
    try:
        at = stream.seek(unit.start)
        if unit.start:  # a line that starts just here has a newline before it
            at = stream.seek(unit.start - 1)
            while (part := lines.readline(2**20)) and not part.endswith(b"\n"):
                at += len(part)
            at += len(part)
        while unit.stop is None or at < unit.stop:
            line = lines.readline(limit + 1)
            if not line:
                return
            start, cut_off = at, len(line) > limit and not line.endswith(b"\n")
            at += len(line)
            if cut_off:
                while (part := lines.readline(2**20)) and not part.endswith(b"\n"):
                    at += len(part)
                at += len(part)
                yield Bad(unit.file, f"byte {start}", too_long(at - start, limit))
                continue
            if start == 0:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield _record(unit.file, f"byte {start}", line, how)
    except EOFError as error:
        yield Bad(unit.file, f"byte {at}", f"cannot be read further: {error}")


def _record(file: File, place: str, line: bytes, how: Reading) -> Record | Bad:
    """Parse one line of JSON."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Bad(file, place, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return Bad(file, place, f"no JSON: {error}")
    if not isinstance(value, dict):
        return Bad(file, place, f"no JSON object but {type(value).__name__}")
    for field in (how.text_field, how.id_field):
        if field is not None and field not in value:
            there = ", ".join(map(str, list(value)[:8]))
            return Bad(file, place, f"no field {field!r} among {there}")
    name = None if how.id_field is None else value[how.id_field]
    return document(file, place, value[how.text_field], name, how)
