"""Decide from a file's name and the beginning of its content how it holds documents.

A suffix of records (.jsonl, .parquet, ...) decides. Under any other name, content that
is JSON records, parquet or arrow is read as that; archives, images, arrays and other
binary data are refused; everything else is one document of text.
"""

import json
import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from data.text.files import File, Format
from data.text.records import ReadSettings, invalid_utf8_offset
from data.text.streams import Stream, open_file

SUPPORTED = (
    "Longhaul reads text in UTF-8, JSON records (a record a line, or an array), csv "
    "and tsv, each also as .gz or .zst, and .parquet and .arrow"
)

_HEAD_BYTES = 2**16
# Longer first records are not recognized as JSON unless the name says so.
_MAX_HEAD_BYTES = 2**26
_NUM_LINES = 64  # the lines that decide whether a file is lines of JSON
_BOM = b"\xef\xbb\xbf"
_COMPRESSION_SUFFIXES = (".gz", ".zst")
_COMPRESSION_MAGIC = {
    b"\x1f\x8b\x08": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
# Corpora name compressed lines of JSON .json.gz, so a damaged record does not make
# such a file a text.
_LINE_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".json.gz", ".json.zst")
_NAMED_FORMATS = {
    **dict.fromkeys(_LINE_SUFFIXES, Format.lines),
    ".csv": Format.csv,
    ".tsv": Format.csv,
    ".parquet": Format.parquet,
    ".arrow": Format.arrow,
}
_RECORD_START = re.compile(r'\s*(\[\s*)?\{\s*"')

_UNPACK = "Unpack it, and name the folder"
_RECOMPRESS = "Decompress it, or compress it as .gz or .zst"
_TO_TEXT = "Extract its text first"
_WRITE_RECORDS = "Write a record a line (.jsonl)"
# (bytes, offset of the bytes, what the file is, remedy)
_MAGIC: list[tuple[bytes, int, str, str]] = [
    (b"PK\x03\x04", 0, "a zip archive (as .docx, .xlsx and .npz are)", _UNPACK),
    (b"PK\x05\x06", 0, "an empty zip archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", 0, "a rar archive", _UNPACK),
    (b"ustar", 257, "a tar archive", _UNPACK),
    (b"1AY&SY", 4, "compressed with bzip2", _RECOMPRESS),
    (b"\xfd7zXZ\0", 0, "compressed with xz", _RECOMPRESS),
    (b"\x04\x22\x4d\x18", 0, "compressed with lz4", _RECOMPRESS),
    (b"\xff\x06\0\0sNaPpY", 0, "compressed with snappy", _RECOMPRESS),
    (b"\x1f\x9d", 0, "compressed with compress (.Z)", _RECOMPRESS),
    (b"\x1f\x8b", 0, "compressed with gzip twice", "Decompress it once"),
    (b"\x28\xb5\x2f\xfd", 0, "compressed with zstd twice", "Decompress it once"),
    (b"\x93NUMPY", 0, "an array of NumPy", "Name the text that it was made from"),
    (b"\x89HDF\r\n\x1a\n", 0, "an HDF5 file", _TO_TEXT),
    (b"SQLite format 3\0", 0, "an SQLite database", _TO_TEXT),
    (b"Obj\x01", 0, "an Avro file", "Convert it to .parquet or .jsonl"),
    (b"\xff\xfe\0\0", 0, "text in UTF-32", "Convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xfe\xff", 0, "text in UTF-32", "Convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", 0, "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", 0, "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8"),
    (b"%PDF-", 0, "a PDF", _TO_TEXT),
    (b"\x89PNG\r\n\x1a\n", 0, "an image", "Leave it out"),
    (b"\xff\xd8\xff", 0, "an image", "Leave it out"),
    (b"GIF87a", 0, "an image", "Leave it out"),
    (b"GIF89a", 0, "an image", "Leave it out"),
]
# Formats without bytes of their own at the beginning, or with bytes that begin a text.
_REFUSED_SUFFIXES = {
    ".bz2": ("compressed with bzip2", _RECOMPRESS),
    ".xz": ("compressed with xz", _RECOMPRESS),
    ".lzma": ("compressed with lzma", _RECOMPRESS),
    ".br": ("compressed with brotli", _RECOMPRESS),
    ".lz4": ("compressed with lz4", _RECOMPRESS),
    ".snappy": ("compressed with snappy", _RECOMPRESS),
    ".zip": ("a zip archive", _UNPACK),
    ".7z": ("a 7z archive", _UNPACK),
    ".rar": ("a rar archive", _UNPACK),
    ".tar": ("a tar archive", _UNPACK),
    ".npy": ("an array of NumPy", "Name the text that it was made from"),
    ".npz": ("an archive of NumPy", "Name the text that it was made from"),
    ".orc": ("an ORC file", "Convert it to .parquet or .jsonl"),
}
_TOKEN_SUFFIXES = (".bin", ".idx", ".dat", ".tokens", ".u16", ".uint16", ".ds")


class Refusal(NamedTuple):
    """A file that cannot be read: what it is, and the remedy."""

    file: File
    kind: str
    remedy: str


def recognize(file: File, settings: ReadSettings) -> File | Refusal:
    """Return a file with its format and compression, or say why it cannot be read.

    `settings.format` decides if it is set. Raises DataError if the file cannot be
    opened, and MissingPackageError if decompressing it needs a missing package.
    """
    named_format = format_of_name(file.name)
    is_table = file.name.lower().endswith((".parquet", ".arrow"))
    if named_format is not None and is_table and settings.format is None:
        return replace(file, format=named_format)
    with open_file(file) as raw:
        file = replace(file, compression=_compression_of(file, raw.peek(4)))
        stream = Stream(raw, file)
        head = stream.peek(_HEAD_BYTES)
        file = replace(file, window_bytes=stream.window_bytes)
        if settings.format is not None:
            return replace(file, format=settings.format)
        if refusal := _refused(file, head):
            return refusal
        if named_format in (None, Format.lines):
            is_named = named_format is not None
            known = _recognize_json(file, stream, settings.text_field, is_named)
            if known is not None:
                return known
    if known_format := named_format or _binary_format(head):
        return replace(file, format=known_format)
    if not settings.keeps_all_bytes and (refusal := _binary_refusal(file, head)):
        return refusal
    return replace(file, format=Format.text)


def format_of_name(name: str) -> Format | None:
    """Return the format that a file's suffix names, or None if content decides."""
    name = name.lower()
    for suffix, format in _NAMED_FORMATS.items():
        if name.endswith((suffix, *(suffix + c for c in _COMPRESSION_SUFFIXES))):
            return format
    return None


def _compression_of(file: File, head: bytes) -> str | None:
    """Return the compression that the first bytes show, or that the suffix names."""
    for magic, compression in _COMPRESSION_MAGIC.items():
        if head.startswith(magic):
            return compression
    suffix = PurePosixPath(file.name.lower()).suffix
    return suffix if suffix in _COMPRESSION_SUFFIXES else None


def _binary_format(head: bytes) -> Format | None:
    if head.startswith(b"PAR1\x15"):  # the first field of a header or of the footer
        return Format.parquet
    # A stream of arrow begins with -1 and the length of its schema, in 32 bits each.
    is_stream = head.startswith(b"\xff\xff\xff\xff") and head[7:8] == b"\0"
    return Format.arrow if is_stream or head.startswith(b"ARROW1\0\0") else None


def _refused(file: File, head: bytes) -> Refusal | None:
    """Return the refusal of a file that its first bytes or its suffix identify."""
    for magic, offset, kind, remedy in _MAGIC:
        if head.startswith(magic, offset):
            return Refusal(file, kind, remedy)
    if kind := _REFUSED_SUFFIXES.get(_inner_suffix(file)):
        return Refusal(file, *kind)
    binary_format = _binary_format(head)
    if binary_format and file.compression:
        return Refusal(file, f"{binary_format} inside {file.compression}", _UNPACK)
    return None


def _binary_refusal(file: File, head: bytes) -> Refusal | None:
    """Return the refusal of a file of an unknown kind that is no text."""
    if _inner_suffix(file) in _TOKEN_SUFFIXES and not _is_text(head):
        kind = "binary data, perhaps token ids of another program"
        return Refusal(file, kind, "Name the text that it was made from")
    if b"\0" in head:
        return Refusal(file, "binary data (it holds zero bytes)", "Leave it out")
    return None


def _inner_suffix(file: File) -> str:
    """Return the suffix of a file's name before the suffix of its compression."""
    return PurePosixPath(file.name.lower().removesuffix(file.compression or "")).suffix


def _is_text(head: bytes) -> bool:
    bad_index = invalid_utf8_offset(head)
    is_valid = bad_index is None or bad_index >= len(head) - 3  # a cut-off character
    return is_valid and b"\0" not in head


def _recognize_json(
    file: File, stream: Stream, text_field: str, is_named: bool
) -> File | Refusal | None:
    """Return a file of JSON records with its format; None for any other content.

    A file that is one JSON object is a record if it has the text field, and otherwise
    a text, such as a config. `is_named` says that the name promises a record a line.
    """
    text, is_whole = _json_head(stream)
    is_array = text.startswith("[")
    if not text.startswith(("{", "[")):
        return None
    if not is_array and _has_record_lines(text, is_whole, text_field, is_named):
        return replace(file, format=Format.lines)
    value, rest = _first_value(text[is_array:].lstrip())
    if is_array and isinstance(value, str) and _inner_suffix(file) == ".json":
        if " " not in value:  # a list of names, as in a config
            return None
        kind = "an array of JSON that holds texts instead of records"
        return Refusal(file, kind, _WRITE_RECORDS)
    if not isinstance(value, dict) or not value:
        return None
    if is_array:
        # A list in source code may begin like an array of JSON.
        is_code = is_whole and text_field not in value and not _is_json(text)
        is_records = rest[:1] in ",]" and not is_code
        return replace(file, format=Format.json) if is_records else None
    if rest:
        return replace(file, format=Format.json) if rest.startswith("{") else None
    if not is_whole or is_named:
        return None
    if isinstance(value.get(text_field), str):
        return replace(file, format=Format.json)
    if field := _field_of_records(value, text_field):
        kind = f"one JSON object that holds records in its field {field!r}"
        return Refusal(file, kind, _WRITE_RECORDS)
    return None


def _json_head(stream: Stream) -> tuple[str, bool]:
    """Return a file's beginning with its first record, and whether it is the whole."""
    size = _HEAD_BYTES
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
    if len(records) == 1 and not isinstance(records[0].get(text_field), str):
        return False
    return 2 * len(records) > len(lines)


def _field_of_records(value: dict[str, Any], text_field: str) -> str | None:
    """Return the field of an object that holds records, or texts by their number."""
    for name, inner in value.items():
        items = inner if isinstance(inner, list) else [None]
        if items and isinstance(items[0], dict):
            if isinstance(items[0].get(text_field), str):
                return name
        elif name == text_field:
            texts = items
            if isinstance(inner, dict) and all(map(str.isdigit, inner)):
                texts = [*inner.values()]
            if texts and all(isinstance(text, str) for text in texts):
                return name
    return None
