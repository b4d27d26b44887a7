"""Recognize records of JSON, under any name, by the beginning of a file."""

import json
import re
from typing import Any

from data.config import FormatName
from data.text.files import File, Format, Refusal
from data.text.json_records import read_json, read_lines
from data.text.kinds import HEAD_BYTES
from data.text.records import field_value
from data.text.streams import Stream

# Longer first records are not recognized as JSON unless the name says so.
_MAX_HEAD_BYTES = 2**26
_NUM_LINES = 64  # the lines that decide whether a file is lines of JSON
_BOM = b"\xef\xbb\xbf"
_RECORD_START = re.compile(r'\s*(\[\s*)?\{\s*"')
_WRITE_RECORDS = "Write a record a line (.jsonl)"


def recognize_json(
    file: File, stream: Stream, text_field: str
) -> Format | Refusal | None:
    """Return the format of a file of JSON records; None for any other content.

    A file that is one JSON object is a record if it has the text field, and otherwise
    a text, such as a config. If the name promises a record a line, a first line that
    begins with JSON is enough.
    """
    is_named = LINES.is_named(file.name)
    text, is_whole = _json_head(stream)
    is_array = text.startswith("[")
    if not text.startswith(("{", "[")):
        return None
    if not is_array and _has_record_lines(text, is_whole, text_field, is_named):
        return LINES
    value, rest = _first_value(text[is_array:].lstrip())
    if is_array and isinstance(value, str) and file.inner_suffix == ".json":
        if " " not in value:  # a list of names, as in a config
            return None
        kind = "an array of JSON that holds texts instead of records"
        return Refusal(file, kind, _WRITE_RECORDS)
    if not isinstance(value, dict) or not value:
        return None
    if is_array:
        # A list in source code may begin like an array of JSON.
        is_code = is_whole and not _is_text(value, text_field) and not _is_json(text)
        is_records = rest[:1] in ",]" and not is_code
        return JSON if is_records else None
    if rest:
        return JSON if rest.startswith("{") else None
    if not is_whole or is_named:
        return None
    if _is_text(value, text_field):
        return JSON
    if field := _field_of_records(value, text_field):
        kind = f"one JSON object that holds records in its field {field!r}"
        return Refusal(file, kind, _WRITE_RECORDS)
    return None


def _json_head(stream: Stream) -> tuple[str, bool]:
    """Return a file's beginning with its first record, and whether it is the whole."""
    size = HEAD_BYTES
    while True:
        head = stream.peek(size + 1)
        is_whole = len(head) <= size
        text = head[:size].removeprefix(_BOM).decode(errors="replace").lstrip()
        begins_record = _RECORD_START.match(text) is not None
        if is_whole or not begins_record or size >= _MAX_HEAD_BYTES:
            return text, is_whole
        value, _ = _first_value(text.removeprefix("[").lstrip())
        if value is not None:
            return text, is_whole
        size *= 4


def _first_value(text: str) -> tuple[Any, str]:
    """Return the JSON value with which a text begins, or None, and the text after."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:].lstrip()


def _is_json(text: str) -> bool:
    value, rest = _first_value(text)
    return value is not None and not rest


def _has_record_lines(
    text: str, is_whole: bool, text_field: str, is_named: bool
) -> bool:
    """Return whether most lines at the beginning of a text are records of JSON."""
    lines = text.split("\n", _NUM_LINES)
    if len(lines) > _NUM_LINES or not is_whole:
        lines.pop()  # it may not be complete
    lines = [line for line in lines if line.strip()]
    values = [_first_value(line) for line in lines]
    records = [value for value, rest in values if isinstance(value, dict) and not rest]
    if is_named:
        return bool(values) and values[0][0] is not None
    records = [record for record in records if record]
    if len(records) == 1 and not _is_text(records[0], text_field):
        return False
    return 2 * len(records) > len(lines)


def _is_text(record: dict[str, Any], text_field: str) -> bool:
    """Return whether a record has a text in this field."""
    try:
        return isinstance(field_value(record, text_field), str)
    except KeyError:
        return False


def _field_of_records(value: dict[str, Any], text_field: str) -> str | None:
    """Return the field of an object that holds records, or texts by their number."""
    for name, inner in value.items():
        items = inner if isinstance(inner, list) else [None]
        if items and isinstance(items[0], dict):
            if _is_text(items[0], text_field):
                return name
        elif name == text_field:
            texts = items
            if isinstance(inner, dict) and all(map(str.isdigit, inner)):
                texts = [*inner.values()]
            if texts and all(isinstance(text, str) for text in texts):
                return name
    return None


LINES = Format(
    name=FormatName.lines,
    kind="JSON records",
    read=read_lines,
    description="JSON records (a record a line, or an array)",
    # Corpora name compressed lines of JSON .json.gz, so a damaged record does not make
    # such a file a text.
    suffixes=(".jsonl", ".ndjson", ".jsonlines", ".json.gz", ".json.zst"),
    is_cut=True,
    recognize=recognize_json,
)
JSON = Format(name=FormatName.json, kind="JSON records", read=read_json)
