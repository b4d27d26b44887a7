"""Turn input records into documents, or into reasons why they cannot be used."""

from dataclasses import dataclass
from typing import NamedTuple

from data.text.files import File


@dataclass(frozen=True)
class Reading:
    """How records become documents."""

    text_field: str = "text"
    id_field: str | None = None
    keep_invalid_utf8: bool = False  # invalid bytes of text are encoded one by one
    max_record_bytes: int = 2**26


class Record(NamedTuple):
    """A document or a piece of one; `ends` is true for its last piece."""

    id: str
    text: bytes
    ends: bool = True


class Bad(NamedTuple):
    """A record or file that cannot be used, and why."""

    file: File
    place: str  # "byte 123", "row 5"
    reason: str


def make_document(
    file: File, location: str, text: object, name: object, reading: Reading
) -> Record | Bad:
    """Return the document of a record's text and id, or why it cannot be used."""
    if not isinstance(text, str | bytes):
        kind = "null" if text is None else type(text).__name__
        return Bad(file, location, f"{reading.text_field!r} is no text but {kind}")
    try:
        encoded = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        reason = f"{reading.text_field!r} holds half a surrogate pair"
        return Bad(file, location, reason)
    if bad_offset(encoded) is not None:
        return Bad(file, location, "not UTF-8")
    if len(encoded) > reading.max_record_bytes:
        return Bad(file, location, too_long(len(encoded), reading.max_record_bytes))
    if isinstance(name, dict | list):
        kind = type(name).__name__
        return Bad(file, location, f"{reading.id_field!r} is no id but {kind}")
    document_name = f"{file.name}:{location}" if name is None else str(name)
    return Record(document_name.encode(errors="replace").decode(), encoded)


def bad_offset(text: bytes) -> int | None:
    """Return the offset of the first byte that is not UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def too_long(size: int, limit: int) -> str:
    """Return the reason for refusing a record of `size` bytes."""
    return f"{size} bytes, longer than max_record_bytes={limit}"
