"""Bytes of input files, decompressed, in bounded memory.

A damaged or cut-off compressed file ends where the damage begins, and its stream says
what was wrong. That storage fails is a DataError, never damage.
"""

import contextlib
import functools
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import fsspec

from data.text.files import File, missing, unreadable

# A cut of running text waits this long for a line to end; less than a unit.
CUT_WINDOW = 2**16


@contextlib.contextmanager
def open_stream(
    file: File, progress: Callable[[int], object] = lambda _: None
) -> Iterator["Stream"]:
    """Open a file; `progress` gets the number of its bytes as they are read.

    Raises DataError if it cannot be opened or read.
    """
    try:
        with fsspec.open(file.path, "rb") as raw:
            counted = _Counted(raw, file.path, progress)
            yield Stream(io.BufferedReader(counted, 2**20), file.compression)
    except (OSError, ValueError) as error:
        raise unreadable(file.path, error) from error


def text_size(file: File) -> int:
    """Count the bytes of a text, decompressed."""
    if file.compression is None:
        return file.size
    with open_stream(file) as stream:
        return stream.skip(2**63)


def align(file: File, offset: int) -> int:
    """Move a place in a text back to the first byte of a character."""
    first = max(0, offset - 3)
    with open_stream(file) as stream:
        stream.seek(first)
        around = stream.take(offset - first + 1)
    while first < offset < first + len(around) and _continues(around[offset - first]):
        offset -= 1
    return offset


def line_number(file: File, offset: int) -> int:
    """Count the line of a byte offset, from 1."""
    line = 1
    with open_stream(file) as stream:
        while data := stream.take(min(offset, 2**20)):
            offset -= len(data)
            line += data.count(b"\n")
    return line


class _Counted(io.RawIOBase):
    """Reads through, and reports how much. That storage fails is no damage."""

    def __init__(self, file: Any, path: str, progress: Callable[[int], object]):
        self._file, self._path, self._progress = file, path, progress
        self.seek, self.tell = file.seek, file.tell

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # each kind of storage has its own
            raise unreadable(self._path, error) from error
        buffer[: len(data)] = data
        self._progress(len(data))
        return len(data)


class _Decompressed(io.RawIOBase):
    """Decompresses one frame after another, up to where the file is damaged."""

    def __init__(self, file: BinaryIO, compression: str):
        self.damage: str | None = None
        self._chunks = self._decompress(file, compression)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (chunk := next(self._chunks, None)) is not None:
            self._ready = memoryview(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, file: BinaryIO, compression: str) -> Iterator[bytes]:
        # Libraries' own readers lose what comes just before damage, and zstandard's
        # takes a file that is cut off for a whole one.
        if compression == ".gz":
            new, damage = functools.partial(zlib.decompressobj, 31), zlib.error
        else:
            try:
                import zstandard
            except ImportError as error:
                raise missing("zstandard", error) from error
            new = zstandard.ZstdDecompressor().decompressobj
            damage = zstandard.ZstdError
        frame, data, padding = None, b"", b""
        while data := data or file.read(2**14):
            if frame is None:
                if not (data := data.lstrip(padding)):
                    continue
                frame = new()
            try:
                yield frame.decompress(data)
            except damage as error:
                self.damage = str(error)
                return
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
                # Tapes and some tools fill gzip's last block with zeros: it allows it.
                padding = b"\0" if compression == ".gz" else b""
        if frame is not None:
            self.damage = "the compressed file ends in the middle"


class Stream:
    """A file, decompressed. `file` is read directly, or by these methods."""

    def __init__(self, raw: BinaryIO, compression: str | None):
        self.file: Any = raw
        self._unpacked = _Decompressed(raw, compression) if compression else None
        if self._unpacked is not None:
            self.file = io.BufferedReader(self._unpacked, 2**20)
        self._ahead = b""

    @property
    def damage(self) -> str | None:
        """The damage after the last readable byte, if reading has reached it."""
        return self._unpacked.damage if self._unpacked else None

    def seek(self, offset: int) -> int:
        """Go to a byte; forward only in a compressed file."""
        return self.skip(offset) if self._unpacked else self.file.seek(offset)

    def skip(self, count: int) -> int:
        """Read past bytes; return how many there were."""
        remaining = count
        while remaining and (data := self.take(min(remaining, 2**20))):
            remaining -= len(data)
        return count - remaining

    def peek(self, count: int) -> bytes:
        """Look at the next bytes: `count` of them, unless the file ends before."""
        self._ahead = self.take(count)
        return self._ahead

    def take(self, count: int) -> bytes:
        """Read `count` bytes, or all that are left."""
        data, self._ahead = self._ahead[:count], self._ahead[count:]
        return data + self.file.read(count - len(data))


def cut_point(window: bytes) -> int:
    """Return by how many bytes a cut moves: to after a line, or else a character."""
    if newline := window.find(b"\n") + 1:
        return newline
    return len([*itertools.takewhile(_continues, window[:3])])


def _continues(byte: int) -> bool:
    """Return whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80
