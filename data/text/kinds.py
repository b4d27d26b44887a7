"""Decide from a file's name and the beginning of its content how it holds documents.

A suffix of records (.jsonl, .parquet, ...) decides. Under any other name, content that
a format recognizes is read as that; archives, images, arrays and other binary data are
refused; everything else is one document of text.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from data.text.files import COMPRESSIONS, File, Format, Refusal
from data.text.plain_text import TEXT
from data.text.records import ReadSettings, invalid_utf8_offset
from data.text.streams import Stream, open_file

HEAD_BYTES = 2**16  # the bytes that show the format of most files

_COMPRESSION_MAGIC = {
    b"\x1f\x8b\x08": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
}

_UNPACK = "Unpack it, and name the folder"
_RECOMPRESS = "Decompress it, or compress it as .gz or .zst"
_TO_TEXT = "Extract its text first"
# (bytes, offset of the bytes, what the file is, remedy)
_MAGIC: list[tuple[bytes, int, str, str]] = [
    (b"PK\x03\x04", 0, "a zip archive (as .docx, .xlsx and .npz are)", _UNPACK),
    (b"PK\x05\x06", 0, "an empty zip archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", 0, "a rar archive", _UNPACK),
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
    ".npy": ("an array of NumPy", "Name the text that it was made from"),
    ".npz": ("an archive of NumPy", "Name the text that it was made from"),
    ".orc": ("an ORC file", "Convert it to .parquet or .jsonl"),
}
_TOKEN_SUFFIXES = (".bin", ".idx", ".dat", ".tokens", ".u16", ".uint16", ".ds")


def recognize(
    file: File, settings: ReadSettings, formats: Sequence[Format]
) -> File | Refusal:
    """Return a file with its format and compression, or say why it cannot be read.

    `settings.format` decides if it is set. Raises DataError if the file cannot be
    opened, and MissingPackageError if decompressing it needs a missing package.
    """
    named = next((f for f in formats if f.is_named(file.name)), None)
    is_compressed = file.name.lower().endswith(COMPRESSIONS)
    is_binary = named is not None and named.begins is not None
    if is_binary and not is_compressed and settings.format is None:
        return replace(file, format=named)
    with open_file(file) as raw:
        file = replace(file, compression=_compression_of(file, raw.peek(4)))
        stream = Stream(raw, file)
        head = stream.peek(HEAD_BYTES)
        file = replace(file, window_bytes=stream.window_bytes)
        if settings.format is not None:
            (chosen,) = (f for f in formats if f.name == settings.format)
            return replace(file, format=chosen)
        binary = next((f for f in formats if f.begins and f.begins(head)), None)
        if refusal := _refused(file, head, binary):
            return refusal
        for format in formats:
            if format.recognize is not None and named in (None, format):
                known = format.recognize(file, stream, settings.text_fields[0])
                if isinstance(known, Refusal):
                    return known
                if known is not None:
                    return replace(file, format=known)
    if known := named or binary:
        return replace(file, format=known)
    if not settings.keeps_all_bytes and (refusal := _binary_refusal(file, head)):
        return refusal
    return replace(file, format=TEXT)


def formats_in_words(formats: Sequence[Format]) -> str:
    """Return the sentence, for messages, that says which files are read."""
    described = [format for format in formats if format.description]
    texts = [format.description for format in described if format.begins is None]
    binary = [format.description for format in described if format.begins is not None]
    words = f"Longhaul reads {', '.join(texts)}, each also as .gz or .zst"
    return f"{words}, and {' and '.join(binary)}"


def _compression_of(file: File, head: bytes) -> str | None:
    """Return the compression that the first bytes show, or that the suffix names."""
    for magic, compression in _COMPRESSION_MAGIC.items():
        if head.startswith(magic):
            return compression
    suffix = PurePosixPath(file.name.lower()).suffix
    return suffix if suffix in COMPRESSIONS else None


def _refused(file: File, head: bytes, binary: Format | None) -> Refusal | None:
    """Return the refusal of a file that its first bytes or its suffix identify.

    `binary` is the binary format whose first bytes the file has.
    """
    for magic, offset, kind, remedy in _MAGIC:
        if head.startswith(magic, offset):
            return Refusal(file, kind, remedy)
    if kind := _REFUSED_SUFFIXES.get(file.inner_suffix):
        return Refusal(file, *kind)
    if binary is not None and file.compression and not binary.may_be_compressed:
        return Refusal(file, f"{binary.name} inside {file.compression}", _UNPACK)
    return None


def _binary_refusal(file: File, head: bytes) -> Refusal | None:
    """Return the refusal of a file of an unknown kind that is no text."""
    if file.inner_suffix in _TOKEN_SUFFIXES and not _is_text(head):
        kind = "binary data, perhaps token ids of another program"
        remedy = "Name the text that it was made from; training reads tokens of other "
        remedy += "programs where they lie with data=megatron, nanogpt or llmc"
        return Refusal(file, kind, remedy)
    if b"\0" in head:
        return Refusal(file, "binary data (it holds zero bytes)", "Leave it out")
    return None


def _is_text(head: bytes) -> bool:
    bad_index = invalid_utf8_offset(head)
    is_valid = bad_index is None or bad_index >= len(head) - 3  # a cut-off character
    return is_valid and b"\0" not in head
