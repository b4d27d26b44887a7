"""Read the tokens of a split at random from files of another program.

The first read of a chunk reads all of it and compares its checksum, as in a token
store. Later reads of that chunk read only the requested tokens.
"""

import functools
import os
import weakref
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.token_files.formats import TokenFiles
from data.token_store.layout import CHUNK_LENGTH, chunk_checksums

_MAX_OPEN = 256  # files; many systems allow only 1,024 open files


class FileTokens:
    """One split of the tokens of some files; several threads may read it."""

    def __init__(
        self,
        files: TokenFiles,
        runs: np.ndarray,
        num_tokens: int,
        dtype: np.dtype,
        checksums: np.ndarray,
    ):
        """Open no file yet.

        Args:
            files: the files whose tokens the splits share.
            runs: int64 [2, n], stretches of tokens that follow each other both in the
                split and in the joined files. runs[0] are their starts in the split,
                ascending from 0, and runs[1] their starts in the joined files.
            num_tokens: the number of tokens in the split.
            dtype: the dtype of the tokens that are returned.
            checksums: uint32, the CRC-32C of each chunk, as the tokens have `dtype`.
        """
        self.dtype = dtype
        self._files = files.files
        self._bounds = files.bounds
        self._starts, self._places = runs
        self._num_tokens = num_tokens
        self._checksums = checksums
        self._is_checked = bytearray(len(checksums))

    def read(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read spans [start, stop) of the split.

        Raises DataError, which names the file and the token, if a file cannot be read
        or its tokens have changed.
        """
        for start, stop in spans:
            for chunk in range(start // CHUNK_LENGTH, -(-stop // CHUNK_LENGTH)):
                if not self._is_checked[chunk]:
                    self._check(chunk)
        return [self._read(start, stop) for start, stop in spans]

    def location(self, token: int) -> str:
        """Return the file of a token of the split, and the token's number there."""
        run = np.searchsorted(self._starts, token, "right") - 1
        file, number = self._find(self._places[run] + token - self._starts[run])
        return f"{self._files[file].path}, token {number}"

    def _check(self, chunk: int) -> None:
        """Compare a chunk with its checksum."""
        start = chunk * CHUNK_LENGTH
        tokens = self._read(start, min(start + CHUNK_LENGTH, self._num_tokens))
        if chunk_checksums(tokens)[0] != self._checksums[chunk]:
            raise DataError(
                f"{self.location(start)}: the tokens from there on are not those of "
                f"the first use. Bring back the file from a copy, or begin a new run"
            )
        self._is_checked[chunk] = True

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens of the split without a check."""
        values = [np.zeros(0, self.dtype)]
        run = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            end = stop
            if run + 1 < len(self._starts):
                end = min(stop, int(self._starts[run + 1]))
            place = int(self._places[run] + start - self._starts[run])
            values += self._read_joined(place, end - start)
            start = end
            run += 1
        return np.concatenate(values)

    def _read_joined(self, place: int, count: int) -> list[np.ndarray]:
        """Read consecutive tokens of the joined files."""
        values = []
        while count:
            index, number = self._find(place)
            file = self._files[index]
            num_read = min(count, file.num_tokens - number)
            itemsize = file.dtype.itemsize
            first_byte = file.first_byte + number * itemsize
            size = num_read * itemsize
            try:
                content = os.pread(_open(file.path).descriptor, size, first_byte)
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
                raise DataError(f"{file.path}: {reason}") from error
            if len(content) != size:
                raise DataError(f"{file.path}: ends before byte {first_byte + size:,}")
            values.append(np.frombuffer(content, file.dtype).astype(self.dtype))
            place += num_read
            count -= num_read
        return values

    def _find(self, place: int) -> tuple[int, int]:
        """Return the file of a joined token, and the token's number in the file."""
        file = int(np.searchsorted(self._bounds, place, "right")) - 1
        return file, int(place - self._bounds[file])


class _OpenFile:
    """An open file, which is closed when its last reference is dropped."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


_open = functools.lru_cache(_MAX_OPEN)(_OpenFile)
