"""Turn input records into documents, or into reasons why they cannot be used."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.config import FormatName
from data.text.files import File


@dataclass(frozen=True)
class ReadSettings:
    """The settings with which documents are read from files."""

    text_field: str | tuple[str, ...] = "text"
    id_field: str | None = None
    # Text files only: keep invalid bytes, each as a token of its own, instead of
    # refusing the text.
    keep_invalid_utf8: bool = False
    max_record_bytes: int = 2**26
    format: FormatName | None = None  # None: name and content of each file decide
    text_separator: str = "\n\n"  # between the texts of several fields

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields whose texts make a document."""
        fields = self.text_field
        return (fields,) if isinstance(fields, str) else fields

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that are read from a record."""
        return (*self.text_fields, *([self.id_field] if self.id_field else []))

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


def text_field_of(value: Any) -> str | tuple[str, ...]:
    """Return the field or fields that a value of the key `text_field` names."""
    return tuple(map(str, value)) if isinstance(value, list) else str(value)


def separator_of(value: str) -> str:
    """Return the separator that a value of the key `text_separator` writes."""
    return value.replace(r"\n", "\n").replace(r"\t", "\t")


def field_value(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field; a.b is the field b of the field a.

    Raises KeyError if there is no such field.
    """
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    value = record[outer]
    if not inner or not isinstance(value, Mapping):
        raise KeyError(field)
    return field_value(value, inner)


def document_of_fields(
    file: File, location: str, record: object, settings: ReadSettings
) -> Record | BadRecord:
    """Make a document of a record with named fields, or say why it cannot be used."""
    if not isinstance(record, Mapping):
        return BadRecord(file, location, f"no JSON object but {type(record).__name__}")
    values = []
    for field in settings.fields:
        try:
            values.append(field_value(record, field))
        except KeyError:
            keys = ", ".join(map(str, list(record)[:8]))
            return BadRecord(file, location, f"no field {field!r} among {keys}")
    return document_of_values(file, location, values, settings)


def document_of_values(
    file: File, location: str, values: list[Any], settings: ReadSettings
) -> Record | BadRecord:
    """Make a document of the values of `settings.fields`."""
    num_texts = len(settings.text_fields)
    texts = values[:num_texts]
    record_id = values[num_texts] if settings.id_field else None
    if num_texts == 1 or not all(isinstance(text, str | bytes) for text in texts):
        wrong = (text for text in texts if not isinstance(text, str | bytes))
        return make_document(file, location, next(wrong, texts[0]), record_id, settings)
    # Half a surrogate pair becomes bytes that are not UTF-8.
    encoded = [
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        for text in texts
    ]
    joined = settings.text_separator.encode().join(encoded)
    return make_document(file, location, joined, record_id, settings)


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
