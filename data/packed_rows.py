"""Rows that hold pieces of documents, by a plan.

The plan is computed once and cached with the SHA-256 of its files.
"""

import contextlib
import hashlib
import logging
import secrets
import shutil
import time
from pathlib import Path

import numpy as np

from data import packing
from data.batch import Batch, Piece, padding
from data.config import Packing
from data.errors import DataError
from data.storage import created_atomically
from data.token_store.reader import TokenArray

PLAN_VERSION = 2
_PLAN = ("starts.npy", "lengths.npy", "row_offsets.npy")
_DIGESTS = "sha256"  # Digests of these files, in the format of sha256sum.
# Larger files are mapped into memory, so that the processes of a host share them.
_READ_BYTES = 2**26

log = logging.getLogger(__name__)


class Packed:
    """Rows by a plan: row r holds pieces row_offsets[r] to row_offsets[r+1] - 1."""

    def __init__(self, tokens: TokenArray, length: int, folder: Path):
        """Open the plan in `folder`.

        Raises:
            OSError, ValueError: if the plan is not what was written.
        """
        self._tokens, self.length = tokens, length
        if (folder / _DIGESTS).read_bytes() != _digests(folder):
            raise ValueError("its files do not match their digests")
        self._starts, self.lengths, self._row_offsets = (
            _load(folder / name) for name in _PLAN
        )

    def __len__(self) -> int:
        return len(self._row_offsets) - 1

    def read(self, numbers: np.ndarray) -> Batch:
        """Read rows by number."""
        first = self._row_offsets[numbers]
        counts = self._row_offsets[numbers + 1] - first
        row = np.repeat(np.arange(len(numbers)), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers_of_pieces = np.repeat(first, counts) + nth
        starts = self._starts[numbers_of_pieces]
        lengths = self.lengths[numbers_of_pieces].astype(np.int64)
        tokens = self._tokens.gather(starts, lengths + 1)
        batch = padding(len(numbers), self.length)
        filled = np.bincount(row, lengths, len(numbers))
        is_text = np.arange(self.length) < filled[:, None]
        batch.inputs[is_text] = np.concatenate([piece[:-1] for piece in tokens])
        batch.targets[is_text] = np.concatenate([piece[1:] for piece in tokens])
        batch.segment_ids[is_text] = np.repeat(nth.astype(np.int32) + 1, lengths)
        firsts = (np.cumsum(lengths) - lengths).astype(np.int32)
        positions = np.arange(lengths.sum(), dtype=np.int32) - np.repeat(
            firsts, lengths
        )
        batch.positions[is_text] = positions
        return batch

    def pieces(self, number: int) -> list[Piece]:
        """List the pieces of a row."""
        span = slice(self._row_offsets[number], self._row_offsets[number + 1])
        starts, lengths = self._starts[span].tolist(), self.lengths[span].tolist()
        columns = np.cumsum([0, *lengths[:-1]]).tolist()
        return list(map(Piece, columns, starts, lengths))


def _load(path: Path) -> np.ndarray:
    mapped = path.stat().st_size > _READ_BYTES
    return np.asarray(np.load(path, mmap_mode="r" if mapped else None))


def _digests(folder: Path) -> bytes:
    """Return the digests of a plan's files, in the format of sha256sum."""
    lines = []
    for name in _PLAN:
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines).encode()


def write_plan(tokens: TokenArray, length: int, kind: Packing, folder: Path) -> None:
    """Compute a plan, write it under a temporary name and rename it."""
    start_s = time.monotonic()
    starts, lengths = packing.pieces(tokens.offsets, length)
    row_offsets = np.arange(len(starts) + 1)
    if kind is Packing.best_fit:
        order, row_offsets = packing.pack(lengths, length)
        starts, lengths = starts[order], lengths[order]
    else:
        assert kind is Packing.none
    try:
        with created_atomically(folder) as building:
            building.mkdir(parents=True)
            for name, array in zip(_PLAN, (starts, lengths, row_offsets), strict=True):
                np.save(building / name, array)
            (building / _DIGESTS).write_bytes(_digests(building))
    except OSError as error:
        raise DataError(
            f"{folder}: the plan of rows cannot be written there ({error}). Name a "
            f"writable folder with data.cache_dir"
        ) from error
    log.info(
        "%s rows: %d pieces in %d rows of %d, %.1f %% filled, %.1f s",
        kind,
        len(starts),
        len(row_offsets) - 1,
        length,
        100 * packing.fill(lengths, row_offsets, length),
        time.monotonic() - start_s,
    )


def remove_plan(folder: Path) -> None:
    """Remove a plan in one step, so that no other process sees a part of it."""
    renamed = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # Another process may have removed it.
        folder.rename(renamed)
        shutil.rmtree(renamed)
