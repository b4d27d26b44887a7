"""Read the samples of a tar file, as WebDataset stores them.

Consecutive members whose names are equal up to the first dot of the last component are
one sample. Its text is the member `.txt`, or otherwise the record in the member
`.json`. Other members, such as images, are left out.
"""

import itertools
import json
import tarfile
from collections.abc import Iterator
from typing import Any

from data.config import FormatName
from data.text.files import Format, Unit
from data.text.records import (
    BadRecord,
    ReadSettings,
    Record,
    Records,
    document_of_fields,
    make_document,
    too_long_reason,
)
from data.text.streams import Stream

_END_BYTES = 1024
_SUFFIXES = ("txt", "json")  # in the order of preference


def read_tar(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the documents of a tar file."""
    sample = "byte 0"
    source: Any = _Source(stream.file)
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            files = (member for member in tar if member.isfile())
            for sample, members in itertools.groupby(files, _sample_of):
                yield from _read_sample(unit, tar, sample, members, settings)
        source.check_end()
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        reason = f"cannot be read further: {stream.damage or error}"
        yield BadRecord(unit.file, f"after {sample}", reason)


class _Source:
    """A file that remembers its last bytes.

    `tarfile` takes a file that ends inside a header for a whole one. A whole one ends
    with two blocks of zeros.
    """

    def __init__(self, file: Any):
        self._file = file
        self._last = b""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._last = (self._last + data)[-_END_BYTES:]
        return data

    def check_end(self) -> None:
        """Read to the end; raise ValueError if it is not the end of a tar file."""
        while self.read(2**20):
            pass
        if self._last != bytes(_END_BYTES):
            raise ValueError("the file ends before the end of the archive")


def _sample_of(member: tarfile.TarInfo) -> str:
    """Return the name of the sample to which a member belongs."""
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _read_sample(
    unit: Unit,
    tar: tarfile.TarFile,
    sample: str,
    members: Iterator[tarfile.TarInfo],
    settings: ReadSettings,
) -> Records:
    """Yield the document of a sample, or why it has none."""
    contents = dict[str, bytes]()
    names = list[str]()
    for member in members:
        suffix = member.name.rpartition("/")[2].partition(".")[2].lower()
        names.append(suffix)
        if suffix not in _SUFFIXES:
            continue
        if member.size > settings.max_record_bytes:
            reason = too_long_reason(member.size, settings.max_record_bytes)
            yield BadRecord(unit.file, member.name, reason)
            return
        # The tar is a stream, so a member must be read before the next one is found.
        file = tar.extractfile(member)
        contents[suffix] = b"" if file is None else file.read()
    if "txt" in contents:
        yield make_document(unit.file, sample, contents["txt"], None, settings)
    elif "json" in contents:
        yield _read_json(unit, sample, contents["json"], settings)
    else:
        reason = f"no .txt and no .json among {', '.join(names[:8])}"
        yield BadRecord(unit.file, sample, reason)


def _read_json(
    unit: Unit, sample: str, content: bytes, settings: ReadSettings
) -> Record | BadRecord:
    """Make a document of a record of JSON."""
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError:
        return BadRecord(unit.file, sample, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRecord(unit.file, sample, f"no JSON: {error}")
    return document_of_fields(unit.file, sample, value, settings)


def _begins_tar(head: bytes) -> bool:
    return head.startswith(b"ustar", 257)


TAR = Format(
    name=FormatName.tar,
    kind="tar files of samples",
    read=read_tar,
    description=".tar of .txt or .json (WebDataset)",
    suffixes=(".tar",),
    begins=_begins_tar,
    may_be_compressed=True,
)
