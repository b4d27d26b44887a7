"""Input files, their formats, and the units into which they are cut.

Content and name of a file decide its format (kinds.py). Text and lines of JSON that are
not compressed are cut into units of 4 MiB that are read independently. The cuts depend
on the file alone, not on the number of processes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from data.errors import DataError, MissingPackageError
from data.splits import Split

if TYPE_CHECKING:
    from data.text.records import ReadSettings, Records
    from data.text.streams import Stream

UNIT_BYTES = 2**22
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Format:
    """How a file holds documents, how its format is recognized, and who reads it.

    Formats are sent to other processes, so compare them by `==` and not by `is`.

    name: the word for it in logs, hashes and the key `format`. It must not change.
    kind: the word for such files in messages, such as "JSON records".
    read: yields the documents of a unit, given the opened file.
    description: says in messages that such files are read, such as "csv and tsv".
    suffixes: the suffixes in lower case that promise the format.
    is_cut: whether an uncompressed file is cut into units that are read independently.
        The reader of such a format finds the first document that begins in its unit,
        and reads the last one to its end in the next unit. Any other reader must get
        the whole file, or it would read all documents again for each unit.
    begins: returns whether the first bytes of a file are those of the format. Only
        binary formats have such bytes.
    may_be_compressed: whether compressed files of a binary format are read.
    recognize: looks at the beginning of a text that has a suffix of the format or of
        no format, and returns the text's format or its refusal, or None if the text is
        something else. It also gets the field of a record that holds the text.
    """

    name: str
    kind: str
    read: "Callable[[Unit, Stream, ReadSettings], Records]"
    description: str = ""
    suffixes: tuple[str, ...] = ()
    is_cut: bool = False
    begins: Callable[[bytes], bool] | None = None
    may_be_compressed: bool = False
    recognize: "Callable[[File, Stream, str], Format | Refusal | None] | None" = None

    def is_named(self, name: str) -> bool:
        """Return whether a file's name promises the format, compressed or not."""
        ends = [suffix + c for suffix in self.suffixes for c in ("", *COMPRESSIONS)]
        return name.lower().endswith(tuple(ends))


@dataclass(frozen=True)
class File:
    """An input file. `version`, such as its mtime or ETag, changes with its content."""

    path: str  # in the form that fsspec accepts
    name: str  # relative to its input; the document ids begin with it
    size: int
    version: str
    format: Format  # TEXT, until the file is recognized
    input: str = ""  # the file, folder or pattern through which the file was found
    compression: str | None = None  # one of COMPRESSIONS
    window_bytes: int = 0  # memory that decompressing needs, if it is known

    @property
    def inner_suffix(self) -> str:
        """The suffix of the file's name before the suffix of its compression."""
        name = self.name.lower().removesuffix(self.compression or "")
        return PurePosixPath(name).suffix


class Refusal(NamedTuple):
    """A file that cannot be read: what it is, and the remedy."""

    file: File
    kind: str
    remedy: str


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
