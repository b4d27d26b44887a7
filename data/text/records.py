"""Turn input records into documents, or into reasons why they cannot be used."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from data.config import FormatName
from data.text.files import File


@dataclass(frozen=True)
class ReadSettings:
    """The settings with which documents are read from files."""

    text_field: str = "text"
    id_field: str | None = None
    # Text files only: keep invalid bytes, each as a token of its own, instead of
    # refusing the text.
    keep_invalid_utf8: bool = False
    max_record_bytes: int = 2**26
    format: FormatName | None = None  # None: name and content of each file decide

    @property
    def keeps_all_bytes(self) -> bool:
        """Whether zero bytes, the sign of binary data, are kept in texts."""
        return self.keep_invalid_utf8 or self.format is FormatName.text


class Record(NamedTuple):
    """A document or a piece of one; `ends` is true for the last piece of a document."""

    id: str
    text: bytes
    ends: bool = True


class BadRecord(NamedTuple):
    """A record or file that cannot be used, and why."""

    file: File
    location: str  # "byte 123", "row 5"
    reason: str


Records = Iterator[Record | BadRecord]


def make_document(
    file: File, location: str, text: object, record_id: object, settings: ReadSettings
) -> Record | BadRecord:
    """Make a document from a record's text and id, or say why it cannot be used."""
    if not isinstance(text, str | bytes):
        kind = "null" if text is None else type(text).__name__
        reason = f"{settings.text_field!r} is no text but {kind}"
        return BadRecord(file, location, reason)
    try:
        encoded = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        reason = f"{settings.text_field!r} holds half a surrogate pair"
        return BadRecord(file, location, reason)
    if invalid_utf8_offset(encoded) is not None:
        return BadRecord(file, location, "not UTF-8")
    if len(encoded) > settings.max_record_bytes:
        reason = too_long_reason(len(encoded), settings.max_record_bytes)
        return BadRecord(file, location, reason)
    if isinstance(record_id, dict | list):
        kind = type(record_id).__name__
        return BadRecord(file, location, f"{settings.id_field!r} is no id but {kind}")
    document_id = f"{file.name}:{location}" if record_id is None else str(record_id)
    return Record(document_id.encode(errors="replace").decode(), encoded)


def invalid_utf8_offset(text: bytes) -> int | None:
    """Return the offset of the first byte that is not UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def too_long_reason(size: int, limit: int) -> str:
    """Return the reason for refusing a record of `size` bytes."""
    return f"{size} bytes, longer than max_record_bytes={limit}"
