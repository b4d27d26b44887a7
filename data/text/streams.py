"""Bytes of input files, decompressed, in bounded memory.

A damaged or cut-off compressed file gives all that comes before the damage, then an
EOFError. That storage fails is a DataError, never damage.
"""

import contextlib
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import fsspec

from data.text.files import File, missing, unreadable

# A cut of running text waits this long for a line to end; less than a unit.
CUT_WINDOW = 2**16


@contextlib.contextmanager
def open_stream(
    file: File, progress: Callable[[int], None] = lambda _: None
) -> Iterator["Stream"]:
    """Open a file; `progress` is told of its bytes as they are read.

    Raises:
        DataError: it cannot be opened or read.
    """
    try:
        with fsspec.open(file.path, "rb") as raw:
            counted = _Counted(raw, file.path, progress)
            yield Stream(file, io.BufferedReader(counted, 2**20))  # type: ignore
    except (OSError, EOFError) as error:
        raise unreadable(file.path, error) from error


def text_size(file: File) -> int:
    """Count the bytes of a text, decompressed."""
    if file.compression is None:
        return file.size
    with open_stream(file) as stream, contextlib.suppress(EOFError):
        return stream.skip(2**63)
    return stream.taken


def align(file: File, at: int) -> int:
    """Move a place in a text back to the first byte of a character."""
    back = min(at, 3)
    with open_stream(file) as stream:
        stream.seek(at - back)
        try:
            around = stream.take(back + 1)
        except EOFError:
            around = stream.left
    moved = 0
    while moved < back and around[back:] and around[back - moved] & 0xC0 == 0x80:
        moved += 1
    return at - moved


def line_numbers(file: File, offsets: list[int]) -> list[int]:
    """Count the line of each of some ascending byte offsets, from 1."""
    found, line = [], 1
    with open_stream(file) as stream, contextlib.suppress(EOFError):
        for offset in offsets:
            while data := stream.take(min(offset - stream.taken, 2**20)):
                line += data.count(b"\n")
            found.append(line)
    return found + [line] * (len(offsets) - len(found))


class _Counted(io.RawIOBase):
    """Reads through, and reports how much. That storage fails is no damage."""

    def __init__(self, file: Any, path: str, progress: Callable[[int], None]):
        self._file, self._path, self._progress = file, path, progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # each kind of storage has its own
            raise unreadable(self._path, error) from error
        buffer[: len(data)] = data
        self._progress(len(data))
        return len(data)


class _Decompressed(io.RawIOBase):
    """Decompresses one frame after another, and gives all that comes before damage.

    It goes in steps of its own, so that how it is read does not change what that is.
    """

    def __init__(self, file: BinaryIO, compression: str):
        self._file, self._padding = file, b""
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")
        if compression == ".gz":
            self._new: Callable[[], Any] = lambda: zlib.decompressobj(31)
            self._error: type[Exception] = zlib.error
            return
        try:
            import zstandard
        except ImportError as error:
            raise missing("zstandard", error) from error
        self._new = lambda: zstandard.ZstdDecompressor().decompressobj()
        self._error = zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._step():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _step(self) -> bool:
        """Decompress a little more; say whether there was any."""
        data = self._rest or self._file.read(2**14)
        self._rest = b""
        if not data:
            if self._frame is not None:
                raise EOFError("the compressed file ends in the middle")
            return False
        if self._frame is None:
            data = data.lstrip(self._padding) if self._padding else data
            if not data:
                return True
            self._frame = self._new()
        try:
            self._ready = memoryview(self._frame.decompress(data))
        except self._error as error:
            raise EOFError(str(error)) from error
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
            # Tapes and some tools fill gzip's last block with zeros, as gzip allows.
            self._padding = b"\0" if self._error is zlib.error else b""
        return True


class Stream:
    """A file, decompressed, with what was read of it before it broke."""

    def __init__(self, file: File, raw: BinaryIO):
        """Read a file through its compression."""
        self._plain = file.compression is None
        self.file: Any = raw
        if file.compression is not None:
            self.file = io.BufferedReader(_Decompressed(raw, file.compression), 2**20)
        self.left, self._ahead, self.taken = b"", b"", 0

    def seek(self, offset: int) -> int:
        """Go to a byte; forward only in a compressed file."""
        if self._plain:
            return self.file.seek(offset)
        return self.skip(offset)

    def skip(self, count: int) -> int:
        """Read past bytes; say how many there were."""
        left = count
        while left and (data := self.take(min(left, 2**20))):
            left -= len(data)
        return count - left

    def peek(self, count: int) -> bytes:
        """Look at the next bytes: `count` of them, unless the file ends before."""
        self._ahead = self.take(count)
        self.taken -= len(self._ahead)
        return self._ahead

    def take(self, count: int) -> bytes:
        """Read `count` bytes, or all that are left; keep them in `left` on failure."""
        found = bytearray(self._ahead[:count])
        self._ahead = self._ahead[count:]
        self.taken += len(found)
        try:
            while len(found) < count:
                data = self.file.read1(min(count - len(found), 2**20))
                if not data:
                    break
                found += data
                self.taken += len(data)
        except EOFError:
            self.left = bytes(found)
            raise
        return bytes(found)


def cut_point(window: bytes) -> int:
    """Return how far into what follows a cut moves: behind a line, else a character."""
    newline = window.find(b"\n")
    if newline >= 0:
        return newline + 1
    moved = 0
    while moved < min(3, len(window)) and window[moved] & 0xC0 == 0x80:
        moved += 1
    return moved
