"""Read the documents of a unit of input, in bounded memory.

A record that cannot be used becomes a `Bad`, with its position and the reason. Good
records before and after it are still read.
"""

import json
from collections.abc import Callable, Iterator

from data.text import files, streams
from data.text.files import File, Format, Unit
from data.text.records import Bad, Reading, Record, bad_offset, make_document, too_long
from data.text.streams import Stream, cut_point, open_stream
from data.text.tables import table_rows

_BOM = b"\xef\xbb\xbf"


def read_documents(
    unit: Unit, reading: Reading, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Record | Bad]:
    """Read the documents of a unit; `progress` gets the number of bytes of each read.

    Raises DataError if the file cannot be opened, or a library is missing.
    """
    readers = {Format.text: _text, Format.lines: _lines}
    reader = readers.get(unit.file.format, table_rows)
    with open_stream(unit.file, progress) as stream:
        yield from reader(unit, stream, reading)


def _text(unit: Unit, stream: Stream, reading: Reading) -> Iterator[Record | Bad]:
    """Yield a text document in pieces of about 4 MiB, cut at ends of lines."""

    def bytes_to_line_end(offset: int) -> int:
        # Bytes from `high` on belong to another split.
        limit = streams.CUT_WINDOW if unit.high is None else unit.high - offset
        return cut_point(stream.peek(min(streams.CUT_WINDOW, limit)))

    offset = stream.seek(unit.start)
    if unit.start != unit.low:
        offset += stream.skip(bytes_to_line_end(offset))
    while True:
        # Pieces end where units do, so that compression does not change them.
        num_units = (offset - unit.low) // files.UNIT_BYTES + 1
        target = unit.low + num_units * files.UNIT_BYTES
        if unit.stop is not None:
            target = min(target, unit.stop)
        text = stream.take(max(0, target - offset))
        # Only a further read reveals that a compressed file is truncated here.
        damage = None if stream.peek(1) else stream.damage
        is_last = not stream.peek(1) or target == unit.high
        if not is_last:
            text += stream.take(bytes_to_line_end(target))
        offset += len(text)
        bad_index = None if reading.keep_invalid_utf8 else bad_offset(text)
        if bad_index is not None and damage is not None and bad_index >= len(text) - 3:
            text = text[:bad_index]  # without the character that is truncated
        elif bad_index is not None:
            yield Bad(unit.file, f"byte {offset - len(text) + bad_index}", "not UTF-8")
            text = b""
        if text or is_last:
            yield Record(unit.file.name, text, is_last)
        if damage is not None:
            yield Bad(unit.file, f"byte {offset}", f"cannot be read further: {damage}")
        if is_last or (unit.stop not in (None, unit.high) and offset >= unit.stop):
            return


def _lines(unit: Unit, stream: Stream, reading: Reading) -> Iterator[Record | Bad]:
    """Yield the lines that start inside the unit."""
    lines, limit = stream.file, reading.max_record_bytes

    def skip_line() -> int:
        size = 0
        while part := lines.readline(2**20):
            size += len(part)
            if part.endswith(b"\n"):
                break
        return size

    offset = 0
    if unit.start:  # a line that starts at unit.start follows a newline
        offset = stream.seek(unit.start - 1) + skip_line()
    while unit.stop is None or offset < unit.stop:
        line = lines.readline(limit + 1)
        start, is_complete = offset, line.endswith(b"\n")
        offset += len(line)
        if len(line) > limit and not is_complete:
            offset += skip_line()
            yield Bad(unit.file, f"byte {start}", too_long(offset - start, limit))
        elif stream.damage is not None and not is_complete:
            reason = f"cannot be read further: {stream.damage}"
            yield Bad(unit.file, f"byte {start}", reason)
            return
        elif not line:
            return
        elif (line := line.removeprefix(_BOM if start == 0 else b"")).strip():
            yield _record(unit.file, f"byte {start}", line, reading)


def _record(file: File, location: str, line: bytes, reading: Reading) -> Record | Bad:
    """Parse one line of JSON."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Bad(file, location, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return Bad(file, location, f"no JSON: {error}")
    if not isinstance(value, dict):
        return Bad(file, location, f"no JSON object but {type(value).__name__}")
    for field in (reading.text_field, reading.id_field):
        if field is not None and field not in value:
            keys = ", ".join(map(str, list(value)[:8]))
            return Bad(file, location, f"no field {field!r} among {keys}")
    name = None if reading.id_field is None else value[reading.id_field]
    return make_document(file, location, value[reading.text_field], name, reading)
