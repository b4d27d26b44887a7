"""Input files, and the units into which they are cut.

The suffix decides the format: lines of JSON (.jsonl, .ndjson, .json.gz, .json.zst),
.parquet, .arrow (as Hugging Face's `save_to_disk` writes it); any other file is one
document. Text and lines of JSON may be compressed (.gz, .zst). If they are not, the
file is cut into units of 4 MiB that are read independently. The cuts depend on the file
alone, not on the number of processes.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Literal

from data.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

UNIT_BYTES = 2**22
_COMPRESSION_SUFFIXES = (".gz", ".zst")
# A .json file is one document, but corpora name compressed lines of JSON .json.gz.
_LINE_SUFFIXES = (".jsonl", ".ndjson")
_COMPRESSED_LINE_SUFFIXES = tuple(
    f"{s}{c}" for s in (*_LINE_SUFFIXES, ".json") for c in _COMPRESSION_SUFFIXES
)


class Format(StrEnum):
    """How a file holds documents."""

    text = "text"
    lines = "lines"
    parquet = "parquet"
    arrow = "arrow"


@dataclass(frozen=True)
class File:
    """An input file. `version`, such as its mtime or ETag, changes with its content."""

    path: str  # in the form that fsspec accepts
    name: str  # relative to its input; the document ids begin with it
    size: int
    version: str

    @property
    def compression(self) -> str | None:
        """The suffix of a compressed file, or None."""
        suffix = PurePosixPath(self.name).suffix.lower()
        return suffix if suffix in _COMPRESSION_SUFFIXES else None

    @property
    def format(self) -> Format:
        """The format that the suffix names."""
        name = self.name.lower()
        if name.endswith((".parquet", ".arrow")):
            return Format(name.rpartition(".")[2])
        has_lines = name.endswith(_LINE_SUFFIXES + _COMPRESSED_LINE_SUFFIXES)
        return Format.lines if has_lines else Format.text


@dataclass(frozen=True)
class Unit:
    """Bytes [start, stop) of a file, which one reader reads.

    `stop` is None for a file that is read as a whole. [low, high) is the range of bytes
    that `cut_file` cut into this and other units. The reader moves a cut inside this
    range forward to the end of a line.
    """

    file: File
    start: int = 0
    stop: int | None = None
    low: int = 0
    high: int | None = None
    split: Split | None = None  # None: a hash of the document's id decides
    marks_end: bool = True  # whether an end-of-text token follows a document

    @property
    def num_bytes(self) -> int:
        """The number of the file's bytes that the unit covers."""
        return self.file.size if self.stop is None else self.stop - self.start


def hash_fraction(document: str) -> float:
    """Hash a document's id to [0, 1); the result decides the document's split."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8]) / 2**64


def units_of(file: File, split: Split | None = None) -> list[Unit]:
    """Cut a file into the units that are read independently of each other."""
    if file.compression or file.format in (Format.parquet, Format.arrow):
        return [Unit(file, split=split)]
    return cut_file(file, 0, file.size, split)


def cut_file(
    file: File, low: int, high: int, split: Split | None = None, marks_end: bool = True
) -> list[Unit]:
    """Cut bytes [low, high) of an uncompressed file into units."""
    unit = Unit(file, low, high, low, high, split, marks_end)
    starts = range(low, max(high, low + 1), UNIT_BYTES)
    return [replace(unit, start=s, stop=min(s + UNIT_BYTES, high)) for s in starts]


def unreadable_error(path: object, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(
        f"{path}: cannot be read ({error}). Make it readable, or leave it out"
    )


def missing_package_error(package: str, error: ImportError) -> DataError:
    """Return the error for an optional library that is not installed."""
    return DataError(
        f"{package} is needed to read this and is not installed ({error}): "
        f'pip install -e ".[data]"'
    )
