"""Input files, and the units into which they are cut.

Content and name of a file decide its format (kinds.py). Text and lines of JSON that are
not compressed are cut into units of 4 MiB that are read independently. The cuts depend
on the file alone, not on the number of processes.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, assert_never

from data.errors import DataError, MissingPackageError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

UNIT_BYTES = 2**22


class Format(StrEnum):
    """How a file holds documents.

    `text`: the file is one document. `lines`: a record of JSON in each line. `json`: an
    array of records, or records that follow each other. `csv`: a table of text with the
    names of its columns in the first line, also with tabs or semicolons. `parquet` and
    `arrow`: a table.
    """

    text = "text"
    lines = "lines"
    json = "json"
    csv = "csv"
    parquet = "parquet"
    arrow = "arrow"

    @property
    def is_cut(self) -> bool:
        """Whether an uncompressed file is cut into units that are read independently.

        The reader of such a format finds the first document that begins in its unit,
        and reads the last one to its end in the next unit. Any other reader must get
        the whole file, or it would read all documents again for each unit.
        """
        match self:
            case Format.text | Format.lines:
                return True
            case Format.json | Format.csv | Format.parquet | Format.arrow:
                return False
            case _:
                assert_never(self)


@dataclass(frozen=True)
class File:
    """An input file. `version`, such as its mtime or ETag, changes with its content."""

    path: str  # in the form that fsspec accepts
    name: str  # relative to its input; the document ids begin with it
    size: int
    version: str
    input: str = ""  # the file, folder or pattern through which the file was found
    format: Format = Format.text
    compression: str | None = None  # ".gz" or ".zst"
    window_bytes: int = 0  # memory that decompressing needs, if it is known


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
    if file.compression or not file.format.is_cut:
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


def missing_package_error(
    package: str, error: ImportError, extra: str = "data"
) -> MissingPackageError:
    """Return the error for an optional library that is not installed."""
    return MissingPackageError(
        f"The package {package} is needed for this and cannot be imported ({error}). "
        f'Install it: pip install -e ".[{extra}]"'
    )
