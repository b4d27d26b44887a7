"""Read input files, decompressed, in bounded memory.

A damaged or truncated compressed file is read up to the damage, and `Stream.damage`
names the reason. A failure of the storage raises DataError and is not damage.
"""

import contextlib
import functools
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import fsspec

from data.errors import DataError
from data.machine import available_memory
from data.text.files import File, missing_package_error, unreadable_error

# Texts are cut into pieces. A cut moves forward to the next line end if one is within
# this many bytes, which must be fewer than UNIT_BYTES (files.py).
CUT_WINDOW = 2**16
# The largest window that zstd writes by default even with --ultra, and the largest
# that it reads at all, which `zstd --long=31` writes.
USUAL_WINDOW_BYTES = 2**27
MAX_WINDOW_BYTES = 2**31
_ZSTD_HEADER_BYTES = 18  # at most, with the magic number


@contextlib.contextmanager
def open_file(
    file: File, progress: Callable[[int], object] = lambda _: None
) -> Iterator[io.BufferedReader]:
    """Open a file as it is stored; `progress` gets the number of bytes of each read.

    Raises DataError if the file cannot be opened or read.
    """
    try:
        with fsspec.open(file.path, "rb") as raw:
            reporting_file = _ReportingFile(raw, file.path, progress)
            yield io.BufferedReader(reporting_file, 2**20)
    except (OSError, ValueError) as error:
        raise unreadable_error(file.path, error) from error


@contextlib.contextmanager
def open_stream(
    file: File, progress: Callable[[int], object] = lambda _: None
) -> Iterator["Stream"]:
    """Open a file, decompressed; arguments and errors are those of `open_file`."""
    with open_file(file, progress) as raw:
        yield Stream(raw, file)


def text_size(file: File) -> int:
    """Return the size in bytes of a text, after decompression."""
    if file.compression is None:
        return file.size
    with open_stream(file) as stream:
        return stream.skip(2**63)


def align_to_character(file: File, offset: int) -> int:
    """Return an offset in a text, moved back to the first byte of a character."""
    window_start = max(0, offset - 3)
    with open_stream(file) as stream:
        stream.seek(window_start)
        window = stream.take(offset - window_start + 1)
    index = offset - window_start
    while 0 < index < len(window) and _is_continuation(window[index]):
        index -= 1
    return window_start + index


def line_number(file: File, offset: int) -> int:
    """Return the line number, from 1, of a byte offset."""
    line = 1
    with open_stream(file) as stream:
        while data := stream.take(min(offset, 2**20)):
            offset -= len(data)
            line += data.count(b"\n")
    return line


class _ReportingFile(io.RawIOBase):
    """A file that reports the bytes read, and raises DataError if its storage fails."""

    def __init__(self, file: Any, path: str, progress: Callable[[int], object]):
        self._file = file
        self._path = path
        self._progress = progress
        self.seek = file.seek
        self.tell = file.tell

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # each storage client has its own exceptions
            raise unreadable_error(self._path, error) from error
        buffer[: len(data)] = data
        self._progress(len(data))
        return len(data)


class _Decompressor(io.RawIOBase):
    """A file that decompresses frame after frame, up to the first damage."""

    def __init__(self, raw: BinaryIO, file: File):
        self.damage: str | None = None
        self.window_bytes = 0  # the largest window of the frames that were opened
        self._path = file.path
        self._chunks = self._decompress(raw, file.compression)
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread and (chunk := next(self._chunks, None)) is not None:
            self._unread = memoryview(chunk)
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count

    def _decompress(self, raw: BinaryIO, compression: str | None) -> Iterator[bytes]:
        # The file readers of gzip and zstandard lose the bytes just before damage, and
        # the reader of zstandard accepts a truncated file without an error.
        if compression == ".gz":
            new_frame = functools.partial(zlib.decompressobj, 31)
            damage_error = zlib.error
        else:
            try:
                import zstandard
            except ImportError as error:
                raise missing_package_error("zstandard", error) from error
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            new_frame = decompressor.decompressobj
            damage_error = zstandard.ZstdError
        frame = None
        data = b""
        padding = b""
        while data := data or raw.read(2**14):
            if frame is None:
                if not (data := data.lstrip(padding)):
                    continue
                if compression == ".zst":
                    data += raw.read(_ZSTD_HEADER_BYTES)
                    self._check_window(data)
                frame = new_frame()
            try:
                yield frame.decompress(data)
            except damage_error as error:
                self.damage = str(error)
                return
            data = b""
            if frame.eof:
                data = frame.unused_data
                frame = None
                # Some tools, such as those for tapes, add zeros after a gzip frame.
                padding = b"\0" if compression == ".gz" else b""
        if frame is not None:
            self.damage = "the compressed file ends in the middle"

    def _check_window(self, data: bytes) -> None:
        """Raise DataError if a frame of zstd needs more memory than is available.

        Damage, also of the header, is left to `decompress`, which reports it.
        """
        import zstandard

        try:
            window_bytes = zstandard.get_frame_parameters(data).window_size
        except zstandard.ZstdError:
            return
        if window_bytes > MAX_WINDOW_BYTES:  # No compressor writes such a header.
            return
        self.window_bytes = max(self.window_bytes, window_bytes)
        if window_bytes <= USUAL_WINDOW_BYTES:
            return
        remedy = "Compress it again without --long, or use a machine with more memory"
        available_bytes = available_memory()
        if available_bytes is not None and window_bytes > available_bytes:
            raise DataError(
                f"{self._path}: was compressed by zstd with a window of "
                f"{window_bytes / 2**30:.1f} GiB, which reading needs in memory, but "
                f"only {available_bytes / 2**30:.1f} GiB are available. {remedy}"
            )


class Stream:
    """A decompressed file, to be read through `file` or by these methods."""

    def __init__(self, raw: BinaryIO, file: File):
        self.file: Any = raw
        self._decompressor = _Decompressor(raw, file) if file.compression else None
        if self._decompressor is not None:
            self.file = io.BufferedReader(self._decompressor, 2**20)
        self._lookahead = b""

    @property
    def damage(self) -> str | None:
        """What is damaged, or None if reading has not reached any damage."""
        return self._decompressor.damage if self._decompressor else None

    @property
    def window_bytes(self) -> int:
        """The memory that the frames read so far need, beyond a few buffers."""
        return self._decompressor.window_bytes if self._decompressor else 0

    def seek(self, offset: int) -> int:
        """Go to an offset and return it; in a compressed file, only before any read."""
        return self.skip(offset) if self._decompressor else self.file.seek(offset)

    def skip(self, count: int) -> int:
        """Skip at most `count` bytes, and return the number of skipped bytes."""
        remaining = count
        while remaining and (data := self.take(min(remaining, 2**20))):
            remaining -= len(data)
        return count - remaining

    def peek(self, count: int) -> bytes:
        """Return the bytes that `take` would return, without consuming them."""
        if count > len(self._lookahead):
            self._lookahead += self.file.read(count - len(self._lookahead))
        return self._lookahead[:count]

    def take(self, count: int) -> bytes:
        """Read `count` bytes, or all that are left."""
        data = self._lookahead[:count]
        self._lookahead = self._lookahead[count:]
        return data + self.file.read(count - len(data))


def cut_distance(window: bytes) -> int:
    """Return how many bytes a cut must move forward, given the bytes after it.

    It moves past the first newline or, without one, past the rest of a split character.
    """
    if newline := window.find(b"\n") + 1:
        return newline
    return len([*itertools.takewhile(_is_continuation, window[:3])])


def _is_continuation(byte: int) -> bool:
    """Return whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80
