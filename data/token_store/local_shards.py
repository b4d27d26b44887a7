"""An array's shards on a local disk, read at random without TensorStore.

TensorStore takes some 30 us to read a stretch of a chunk, whatever its length. Of an
array as token_store/writer.py makes it, whose values lie in the files as they are, a
stretch is one `pread`. A chunk's checksum is checked when it is first read; after that
only the stretch that is asked for is read.

The files are read, not mapped into memory: `pread` of a bad sector, or of a file that
was cut off, is an error, where a mapping ends the process by SIGBUS; and what the
system keeps of the files is not counted as this process' memory.

Source: zarr v3, codecs sharding-indexed and crc32c, version 1.0.
"""

import functools
import itertools
import os
import weakref
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
import tensorstore as ts

_MAX_OPEN = 256  # shards of all arrays together: a process may often open 1,024 files
_CHECKSUM_BYTES = 4
_CRC_OF_CHECKED = 0x48674BC7  # the CRC-32C of any bytes followed by their own CRC-32C
_CHECKED = [
    {"configuration": {"endian": "little"}, "name": "bytes"},
    {"name": "crc32c"},
]
_AT_ONCE = 64  # stretches: each may hold a file open
_Stretch = tuple[int, int, int]  # chunk, first value in it, where it ends


class LocalShards:
    """One array of a store on a local disk; several threads may read it."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        length: int,
        metadata: Any,
        checksums: np.ndarray | None,
    ):
        """Take the lengths from the array's metadata; no shard is opened."""
        self._checksums = checksums
        self.folder, self._dtype, self._width = folder, dtype, dtype.itemsize
        (shard_length,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        (self._chunk_length,) = metadata["codecs"][0]["configuration"]["chunk_shape"]
        self.chunks_per_shard = shard_length // self._chunk_length
        self._none = [np.zeros(0, self._dtype)]
        self._chunk_bytes = self._chunk_length * self._width + _CHECKSUM_BYTES
        self._checked = bytearray(-(-length // self._chunk_length))

    @classmethod
    def of(
        cls,
        folder: Path | None,
        array: ts.TensorStore,
        checksums: np.ndarray | None = None,
    ) -> Self | None:
        """Return an array's shards, None if they are remote or compressed.

        `checksums` has the CRC-32C of each chunk, if the store knows them.
        """
        metadata = array.spec().to_json()["metadata"]
        codecs = metadata["codecs"]
        plain = {
            "chunk_shape": codecs[0].get("configuration", {}).get("chunk_shape"),
            "codecs": _CHECKED,
            "index_codecs": _CHECKED,
            "index_location": "end",
        }
        supported = [{"configuration": plain, "name": "sharding_indexed"}]
        if folder is None or codecs != supported:
            return None
        dtype, length = array.dtype.numpy_dtype, array.shape[0]
        return cls(folder, dtype, length, metadata, checksums)

    def read(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read stretches [start, stop); the disk is asked for many at once.

        Raises:
            OSError: a file is not there, or cannot be read.
            ValueError: a file's content is not what was written.
        """
        values = []
        for first in range(0, len(spans), _AT_ONCE):
            batch = spans[first : first + _AT_ONCE]
            parts = [[self._place(*part) for part in self._cut(*s)] for s in batch]
            if hasattr(os, "posix_fadvise"):
                for shard, offset, size, *_ in itertools.chain.from_iterable(parts):
                    os.posix_fadvise(shard.file, offset, size, os.POSIX_FADV_WILLNEED)
            for of_span in parts:
                read = [self._read(*part) for part in of_span]
                contents = (
                    read[0] if len(read) == 1 else np.concatenate(read or self._none)
                )
                values.append(contents)
        return values

    def _cut(self, start: int, stop: int) -> list[_Stretch]:
        """Cut a stretch at the chunks."""
        length = self._chunk_length
        first, last = start // length, -(-stop // length)
        if last == first + 1:
            return [(first, start - first * length, stop - first * length)]
        return [
            (n, max(start - n * length, 0), min(stop - n * length, length))
            for n in range(first, last)
        ]

    def _place(
        self, chunk: int, low: int, high: int
    ) -> tuple["_Shard", int, int, _Stretch | None]:
        """Return shard, offset and bytes to read, and what of a chunk to check."""
        number, nth = divmod(chunk, self.chunks_per_shard)
        shard, width = _open(self, number), self._width
        offset, size = shard.index[2 * nth], shard.index[2 * nth + 1]
        if size != self._chunk_bytes:
            raise ValueError(f"{shard.path}: chunk {nth} is not there")
        if self._checked[chunk]:
            return shard, offset + low * width, (high - low) * width, None
        return shard, offset, size, (chunk, low, high)

    def _read(
        self, shard: "_Shard", offset: int, size: int, unchecked: _Stretch | None
    ) -> np.ndarray:
        if unchecked is None:
            return np.frombuffer(shard.read(offset, size), self._dtype)
        chunk, low, high = unchecked
        content = shard.read_checked(offset, size)
        checksum = int.from_bytes(content[-_CHECKSUM_BYTES:], "little")
        if self._checksums is not None and checksum != self._checksums[chunk]:
            raise ValueError(f"{shard.path}: chunk {chunk} is one of another store")
        self._checked[chunk] = True
        # A copy, so that the next chunk can be read into the same memory.
        return np.frombuffer(content, self._dtype, self._chunk_length)[low:high].copy()


class _Shard:
    """An open file of chunks. It is closed with its last reference."""

    def __init__(self, path: Path, num_chunks: int):
        self.path, self.file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        size = 16 * num_chunks + _CHECKSUM_BYTES
        content = self.read_checked(os.fstat(self.file).st_size - size, size)
        # Offset and size of each chunk; both are 2**64 - 1 of one that is missing.
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
def _open(array: LocalShards, number: int) -> _Shard:
    return _Shard(array.folder / "c" / str(number), array.chunks_per_shard)
