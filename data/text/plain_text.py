"""Read a text, which is a single document, in pieces."""

from data.config import FormatName
from data.text import files, records, streams
from data.text.files import Format, Unit
from data.text.records import BadRecord, ReadSettings, Record, Records
from data.text.streams import Stream, cut_distance


def read_text(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
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
        bad_index = None
        reason = "not UTF-8"
        if not settings.keep_invalid_utf8:
            bad_index = records.invalid_utf8_offset(text)
        if bad_index is None and not settings.keeps_all_bytes and b"\0" in text:
            bad_index = text.index(b"\0")
            reason = "a zero byte, the sign of binary data and not of text"
        if bad_index is not None and damage is not None and bad_index >= len(text) - 3:
            text = text[:bad_index]  # drop the truncated character
        elif bad_index is not None:
            location = f"byte {offset - len(text) + bad_index}"
            yield BadRecord(unit.file, location, reason)
            text = b""
        if text or is_last:
            yield Record(unit.file.name, text, is_last)
        if damage is not None:
            reason = f"cannot be read further: {damage}"
            yield BadRecord(unit.file, f"byte {offset}", reason)
        if is_last or (unit.stop not in (None, unit.high) and offset >= unit.stop):
            return


TEXT = Format(
    name=FormatName.text,
    kind="text",
    read=read_text,
    description="text in UTF-8",
    is_cut=True,
)
