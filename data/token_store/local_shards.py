"""Read an array's shards on a local disk at random, without TensorStore.

A stretch is a range of values within one chunk. TensorStore takes about 30 us to read a
stretch of any length. Values are stored uncompressed (token_store/layout.py), so this
module reads a stretch with one `pread`. The first read of a chunk reads all of it and
checks its checksum; later reads of that chunk read only the requested stretch.

The files are not mapped into memory. `pread` of a bad sector, or of a truncated file,
raises an error, whereas access to a mapping ends the process by SIGBUS. Cached pages of
a mapping would also count as memory of this process.

Source: zarr v3, codecs sharding-indexed and crc32c, version 1.0.
"""

import functools
import itertools
import os
import weakref
from pathlib import Path

import google_crc32c
import numpy as np

from data.storage import check_regular
from data.token_store.layout import CHUNK_LENGTH, SHARD_LENGTH

_MAX_OPEN = 256  # open shards of all arrays; many systems allow only 1,024 open files
_CHECKSUM_BYTES = 4
_CRC_OF_CHECKED = 0x48674BC7  # the CRC-32C of any bytes followed by their own CRC-32C
_SPANS_AT_ONCE = 64  # spans that are read together; their shards stay open
_Stretch = tuple[int, int, int]  # chunk, start and stop within the chunk


class LocalShards:
    """One array of a store on a local disk; several threads may read it."""

    def __init__(
        self, folder: Path, dtype: np.dtype, length: int, checksums: np.ndarray | None
    ):
        """Open no file yet. `checksums` are the CRC-32C of all chunks, if known."""
        self.folder = folder
        self._dtype = dtype
        self._checksums = checksums
        self._chunk_bytes = CHUNK_LENGTH * dtype.itemsize + _CHECKSUM_BYTES
        self._checked = bytearray(-(-length // CHUNK_LENGTH))

    def read(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Return the values of spans [start, stop), with many disk reads in flight.

        Raises OSError if a file cannot be read, and ValueError if it is damaged.
        """
        values = []
        for start in range(0, len(spans), _SPANS_AT_ONCE):
            batch = spans[start : start + _SPANS_AT_ONCE]
            locations = [
                [self._locate(*s) for s in _stretches(*span)] for span in batch
            ]
            if hasattr(os, "posix_fadvise"):
                for shard, offset, size, _ in itertools.chain.from_iterable(locations):
                    os.posix_fadvise(shard.file, offset, size, os.POSIX_FADV_WILLNEED)
            for span_locations in locations:
                stretches = [self._read(*location) for location in span_locations]
                stretches = stretches or [np.zeros(0, self._dtype)]
                is_single = len(stretches) == 1
                values.append(stretches[0] if is_single else np.concatenate(stretches))
        return values

    def _locate(
        self, chunk: int, start: int, stop: int
    ) -> tuple["_Shard", int, int, _Stretch | None]:
        """Return the shard, and the offset and size in bytes of what to read from it.

        For an unchecked chunk, these are of the whole chunk, and the last result is the
        stretch to return from it. For a checked chunk, the last result is None.
        """
        shard_number, slot = divmod(chunk, SHARD_LENGTH // CHUNK_LENGTH)
        shard = _open_shard(self, shard_number)
        itemsize = self._dtype.itemsize
        offset = shard.index[2 * slot]
        size = shard.index[2 * slot + 1]
        if size != self._chunk_bytes:
            raise ValueError(f"{shard.path}: chunk {slot} is not there")
        if self._checked[chunk]:
            return shard, offset + start * itemsize, (stop - start) * itemsize, None
        return shard, offset, size, (chunk, start, stop)

    def _read(
        self, shard: "_Shard", offset: int, size: int, unchecked: _Stretch | None
    ) -> np.ndarray:
        if unchecked is None:
            return np.frombuffer(shard.read(offset, size), self._dtype)
        chunk, start, stop = unchecked
        content = shard.read_checked(offset, size)
        checksum = int.from_bytes(content[-_CHECKSUM_BYTES:], "little")
        if self._checksums is not None and checksum != self._checksums[chunk]:
            raise ValueError(f"{shard.path}: chunk {chunk} is one of another store")
        self._checked[chunk] = True
        # Copy the stretch, so that the memory of the whole chunk is freed.
        return np.frombuffer(content, self._dtype, CHUNK_LENGTH)[start:stop].copy()


def _stretches(start: int, stop: int) -> list[_Stretch]:
    """Return the stretches that make up a span [start, stop), one for each chunk."""
    return [
        (
            chunk,
            max(start - chunk * CHUNK_LENGTH, 0),
            min(stop - chunk * CHUNK_LENGTH, CHUNK_LENGTH),
        )
        for chunk in range(start // CHUNK_LENGTH, -(-stop // CHUNK_LENGTH))
    ]


class _Shard:
    """An open file of chunks, which is closed when its last reference is dropped."""

    def __init__(self, path: Path):
        check_regular(path)
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        size = 16 * (SHARD_LENGTH // CHUNK_LENGTH) + _CHECKSUM_BYTES
        content = self.read_checked(os.fstat(self.file).st_size - size, size)
        # Offset and size of each chunk; both are 2**64 - 1 if the chunk is missing.
        self.index = memoryview(content[:-_CHECKSUM_BYTES]).cast("Q")

    def read(self, offset: int, size: int) -> bytes:
        content = os.pread(self.file, size, offset)
        if len(content) != size:
            raise ValueError(f"{self.path}: ends before byte {offset + size}")
        return content

    def read_checked(self, offset: int, size: int) -> bytes:
        content = self.read(offset, size)
        if google_crc32c.value(content) != _CRC_OF_CHECKED:
            raise ValueError(f"{self.path}: bytes from {offset} on are not as written")
        return content


@functools.lru_cache(_MAX_OPEN)
def _open_shard(array: LocalShards, shard_number: int) -> _Shard:
    return _Shard(array.folder / "c" / str(shard_number))
