"""One split of a token store, read at random: from memory when it is small.

Every chunk's checksum is checked when the chunk is read, and a chunk that is not
there is damage too, never zeros.
"""

from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from data.errors import DataError

# A split of at most this size is read into memory once: its rows then cost a copy.
MEMORY_LIMIT_BYTES = 2**30
_CACHE_LIMIT_BYTES = 2**28


class TokenArray:
    """One split of a store: a flat array of tokens, and where its documents start."""

    def __init__(self, path: Path):
        """Open `path`; read the offsets, and the tokens too when they are few."""
        self._path = path / "tokens"
        opened = _open_array(self._path)
        self._num_tokens = opened.shape[0]
        size = self._num_tokens * opened.dtype.numpy_dtype.itemsize
        self.in_memory = size <= MEMORY_LIMIT_BYTES
        self._tokens = _read(self._path, opened) if self.in_memory else opened
        # int64 [documents + 1]: the start of each document, then the end
        self.offsets = _read(path / "offsets", _open_array(path / "offsets"))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._num_tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), in the store's dtype.

        Raises:
            DataError: a chunk is missing or damaged.
        """
        return _read(self._path, self._tokens[start:stop])

    def read_rows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Read the tokens [start, start + width) of each start as int32 [rows, width].

        What lies behind the last token reads as 0.

        Raises:
            DataError: a chunk is missing or damaged.
        """
        rows = np.zeros((len(starts), width), np.int32)
        ends = np.minimum(starts + width, len(self))
        spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
        parts: list[Any] = [self._tokens[a:b] for a, b in spans if a < b]
        if not self.in_memory:
            # All reads are under way before the first one is awaited.
            parts = [part.read() for part in parts]
        for row, part in zip(np.flatnonzero(starts < ends), parts, strict=True):
            tokens = _read(self._path, part)
            rows[row, : len(tokens)] = tokens
        return rows


def _open_array(path: Path) -> ts.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        # A store holds every chunk, so that a missing one is not read as zeros.
        "fill_missing_data_reads": False,
        # Stores do not change: what was read once need not be looked at again.
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "context": {"cache_pool": {"total_bytes_limit": _CACHE_LIMIT_BYTES}},
    }
    try:
        return ts.open(spec, read=True, open=True).result()
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from error


def _read(path: Path, values: Any) -> np.ndarray:
    """Wait for an array, an open store of it or a future of it."""
    try:
        if isinstance(values, ts.TensorStore):
            values = values.read()
        return values.result() if isinstance(values, ts.Future) else values
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    store = path.parent.parent
    return DataError(
        f"{path}: is missing or damaged ({error}). Delete {store}; it is built again "
        f"on the next start"
    )
