"""Read the documents of a unit of input, in bounded memory.

A record that cannot be used becomes a `BadRecord` with its location and the reason.
Good records before and after a bad one are still read.
"""

import json
from collections.abc import Callable

from data.text import files, records, streams
from data.text.files import File, Format, Unit
from data.text.records import BadRecord, ReadSettings, Record, Records, make_document
from data.text.streams import Stream, cut_distance, open_stream
from data.text.tables import read_table

_BOM = b"\xef\xbb\xbf"


def read_documents(
    unit: Unit,
    settings: ReadSettings,
    progress: Callable[[int], object] = lambda _: None,
) -> Records:
    """Read the documents of a unit; call `progress` with the bytes of each read.

    Raises DataError if the file cannot be read, or an optional package is missing.
    """
    readers = {Format.text: _read_text, Format.lines: _read_lines}
    reader = readers.get(unit.file.format, read_table)
    with open_stream(unit.file, progress) as stream:
        yield from reader(unit, stream, settings)


def _read_text(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield a unit of a text in pieces of about 4 MiB, cut at line ends if possible."""

    def bytes_to_line_end(offset: int) -> int:
        # Bytes from `high` on belong to another split.
        limit = streams.CUT_WINDOW if unit.high is None else unit.high - offset
        return cut_distance(stream.peek(min(streams.CUT_WINDOW, limit)))

    offset = stream.seek(unit.start)
    if unit.start != unit.low:
        offset += stream.skip(bytes_to_line_end(offset))
    while True:
        # Pieces end where a plain file's units do, so a compressed file has the same.
        num_units = (offset - unit.low) // files.UNIT_BYTES + 1
        piece_end = unit.low + num_units * files.UNIT_BYTES
        if unit.stop is not None:
            piece_end = min(piece_end, unit.stop)
        text = stream.take(max(0, piece_end - offset))
        # Only a further read reveals that a compressed file is truncated here.
        damage = None if stream.peek(1) else stream.damage
        is_last = not stream.peek(1) or piece_end == unit.high
        if not is_last:
            text += stream.take(bytes_to_line_end(piece_end))
        offset += len(text)
        bad_index = (
            None if settings.keep_invalid_utf8 else records.invalid_utf8_offset(text)
        )
        if bad_index is not None and damage is not None and bad_index >= len(text) - 3:
            text = text[:bad_index]  # drop the truncated character
        elif bad_index is not None:
            location = f"byte {offset - len(text) + bad_index}"
            yield BadRecord(unit.file, location, "not UTF-8")
            text = b""
        if text or is_last:
            yield Record(unit.file.name, text, is_last)
        if damage is not None:
            reason = f"cannot be read further: {damage}"
            yield BadRecord(unit.file, f"byte {offset}", reason)
        if is_last or (unit.stop not in (None, unit.high) and offset >= unit.stop):
            return


def _read_lines(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the records of the lines that start inside the unit."""
    lines, limit = stream.file, settings.max_record_bytes

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
        start, is_complete = offset, line.endswith(b"\n")
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
            yield _parse_record(unit.file, f"byte {start}", line, settings)


def _parse_record(
    file: File, location: str, line: bytes, settings: ReadSettings
) -> Record | BadRecord:
    """Parse one line of JSON."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return BadRecord(file, location, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRecord(file, location, f"no JSON: {error}")
    if not isinstance(value, dict):
        return BadRecord(file, location, f"no JSON object but {type(value).__name__}")
    for field in (settings.text_field, settings.id_field):
        if field is not None and field not in value:
            keys = ", ".join(map(str, list(value)[:8]))
            return BadRecord(file, location, f"no field {field!r} among {keys}")
    text, id_field = value[settings.text_field], settings.id_field
    record_id = None if id_field is None else value[id_field]
    return make_document(file, location, text, record_id, settings)
