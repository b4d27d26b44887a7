"""Rows of T positions cut from one split of a store, each read by its number.

A row is inputs and the targets that follow them, with segments and positions that
start anew with each document. `Concatenated` rows are the tokens end to end; `Packed`
rows hold pieces of documents by a plan, which is made once and kept in the cache, with
the SHA-256 of its files; one that is damaged is made anew.
"""

import contextlib
import hashlib
import logging
import secrets
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import packing
from data.config import DataConfig, Packing
from data.errors import DataError
from data.text.files import Split
from data.token_store.reader import TokenArray
from data.token_store.storage import written_whole
from data.token_store.store import Store

_PLAN_VERSION = 2
_PLAN = ("starts.npy", "lengths.npy", "row_offsets.npy")
_DIGESTS = "sha256"  # of these files, as sha256sum lists them
# Larger files are mapped, so that the processes of a host share them in memory.
_READ_BYTES = 2**26
_ATTEMPTS = 3  # to plan: other processes may remove what they found damaged

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Rows of T tokens and what they predict; all int32 [rows, T].

    numpy arrays here; whatever holds them once they have left the host.
    """

    inputs: Any
    targets: Any  # the token that follows each input; -1: none to be learnt
    segment_ids: Any  # 1, 2, ... by document within the row; 0 is padding
    positions: Any  # from 0 at each document's first token within the row


def padding(num_rows: int, length: int) -> Batch:
    """Return rows without text."""
    batch = Batch(*np.zeros((4, num_rows, length), np.int32))
    batch.targets[:] = -1
    return batch


class Piece(NamedTuple):
    """A stretch of tokens that stands in a row from a column on."""

    column: int
    start: int  # of its inputs; its targets lie one further
    length: int


class Concatenated:
    """Row r covers the tokens [r T, r T + T]: its last one is the next row's first."""

    def __init__(
        self, tokens: TokenArray, length: int, count: int, document_mask: bool
    ):
        """Cut `count` rows of `length` positions."""
        self._tokens, self.length, self._count = tokens, length, count
        self._document_mask = document_mask

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: np.ndarray) -> Batch:
        """Read rows by number, int64 [n]; a damaged chunk raises a DataError."""
        starts = numbers * self.length
        wanted = np.minimum(len(self._tokens) - starts, self.length + 1)
        rows = np.zeros((len(numbers), self.length + 1), np.int32)
        there = np.arange(self.length + 1) < wanted[:, None]
        rows[there] = np.concatenate(self._tokens.gather(starts, wanted))
        row, column = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._document_mask:
            row, start = self._tokens.starts_within(starts, starts + self.length)
            column = start - starts[row]
        return cut_rows(rows, row, column, len(self._tokens) - starts)

    def pieces(self, number: int) -> list[Piece]:
        """List the stretches of text in a row: one piece a document."""
        low = number * self.length
        high = min(low + self.length, len(self._tokens) - 1)
        _, starts = self._tokens.starts_within(np.array([low]), np.array([high - 1]))
        bounds = [low, *starts.tolist(), high]
        return [Piece(a - low, a, b - a) for a, b in pairwise(bounds) if b > a]


def cut_rows(
    tokens: np.ndarray, row: np.ndarray, column: np.ndarray, left: np.ndarray
) -> Batch:
    """Turn rows of T+1 tokens into inputs and targets that respect the documents.

    Args:
        tokens: int32 [rows, T+1].
        row: int64 [n], the row of each document's start but those that start a row.
        column: int64 [n], from 1 to T, where in it: not predicted from what is before.
        left: int64 [rows], the tokens from each row's start on; the rest is padding.
    """
    num_rows, length = tokens.shape[0], tokens.shape[1] - 1
    targets = tokens[:, 1:].copy()
    columns = np.arange(length, dtype=np.int32)
    positions = np.tile(columns, (num_rows, 1))
    segment_ids = np.ones_like(positions)
    if len(row):
        targets[row, column - 1] = -1
        row, column = row[column < length], column[column < length]
        begins = np.zeros_like(positions)
        begins[row, column] = 1
        segment_ids += np.cumsum(begins, axis=1, dtype=np.int32)
        begins[row, column] = column
        positions -= np.maximum.accumulate(begins, axis=1)
    inputs = tokens[:, :-1].copy()
    if (left <= length).any():
        padding = columns >= left[:, None] - 1
        targets[padding] = -1
        for array in (inputs, segment_ids, positions):
            array[padding] = 0
    return Batch(inputs, targets, segment_ids, positions)


class Packed:
    """Rows by a plan: row r holds the pieces row_offsets[r] to row_offsets[r+1]."""

    def __init__(self, tokens: TokenArray, length: int, folder: Path):
        """Open the plan in `folder`.

        Raises:
            OSError, ValueError: it is not what was written.
        """
        self._tokens, self.length = tokens, length
        if (folder / _DIGESTS).read_bytes() != _digests(folder):
            raise ValueError("it is not what was written")
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
        piece = np.repeat(first, counts) + nth
        starts = self._starts[piece]
        lengths = self.lengths[piece].astype(np.int64)
        tokens = self._tokens.gather(starts, lengths + 1)
        batch = padding(len(numbers), self.length)
        filled = np.bincount(row, lengths, len(numbers))
        there = np.arange(self.length) < filled[:, None]
        batch.inputs[there] = np.concatenate([piece[:-1] for piece in tokens])
        batch.targets[there] = np.concatenate([piece[1:] for piece in tokens])
        batch.segment_ids[there] = np.repeat(nth.astype(np.int32) + 1, lengths)
        begins = (np.cumsum(lengths) - lengths).astype(np.int32)
        within = np.arange(lengths.sum(), dtype=np.int32) - np.repeat(begins, lengths)
        batch.positions[there] = within
        return batch

    def pieces(self, number: int) -> list[Piece]:
        """List the stretches of text in a row."""
        span = slice(self._row_offsets[number], self._row_offsets[number + 1])
        starts, lengths = self._starts[span].tolist(), self.lengths[span].tolist()
        columns = np.cumsum([0, *lengths[:-1]]).tolist()
        return list(map(Piece, columns, starts, lengths))


def _load(path: Path) -> np.ndarray:
    mapped = path.stat().st_size > _READ_BYTES
    return np.asarray(np.load(path, mmap_mode="r" if mapped else None))


def _digests(folder: Path) -> bytes:
    """Read a plan's files, and list their hashes."""
    lines = []
    for name in _PLAN:
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines).encode()


def _plan(tokens: TokenArray, length: int, kind: Packing, folder: Path) -> None:
    """Compute which pieces make up which rows; write it beside and rename it."""
    began = time.monotonic()
    starts, lengths = packing.pieces(tokens.offsets, length)
    row_offsets = np.arange(len(starts) + 1)
    if {Packing.best_fit: True, Packing.none: False}[kind]:
        order, row_offsets = packing.pack(lengths, length)
        starts, lengths = starts[order], lengths[order]
    try:
        with written_whole(folder) as building:
            building.mkdir(parents=True)
            for name, array in zip(_PLAN, (starts, lengths, row_offsets), strict=True):
                np.save(building / name, array)
            (building / _DIGESTS).write_bytes(_digests(building))
    except OSError as error:
        raise DataError(
            f"{folder}: the plan of rows cannot be kept there ({error}). Name a "
            f"folder that can be written with data.cache_dir"
        ) from error
    log.info(
        "%s rows: %d pieces in %d rows of %d, %.1f %% filled, %.1f s",
        kind,
        len(starts),
        len(row_offsets) - 1,
        length,
        100 * packing.fill(lengths, row_offsets, length),
        time.monotonic() - began,
    )


def _remove(folder: Path) -> None:
    """Remove a plan at once, so that no other process sees a part of it."""
    aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # another process was faster, or it stays
        folder.rename(aside)
        shutil.rmtree(aside)


Rows = Concatenated | Packed  # of a split; numbers to read are int64 [n], in any order


def open_rows(
    store: Store, config: DataConfig, split: Split, cache: Path, pad: bool = False
) -> Rows:
    """Open the rows of a split as the config wants them.

    Rows of `concat` are whole ones; `pad` also takes the last, filled up.

    Raises:
        DataError: the store is damaged, or a plan cannot be kept.
    """
    tokens, length = store.split(split), config.sequence_length
    if config.packing is Packing.concat:
        num_pairs = max(0, len(tokens) - 1)
        count = -(-num_pairs // length) if pad else num_pairs // length
        return Concatenated(tokens, length, count, config.document_mask)
    name = f"{store.fingerprint[:16]}-{split}-{config.packing}-{length}"
    folder = cache / f"{name}-v{_PLAN_VERSION}"
    for _ in range(_ATTEMPTS):
        if not folder.exists():
            _plan(tokens, length, config.packing, folder)
        try:
            return Packed(tokens, length, folder)
        except (OSError, ValueError) as error:
            warning = "%s: this plan of rows cannot be trusted (%s); planning anew"
            log.warning(warning, folder, error)
            _remove(folder)
    raise DataError(
        f"{folder}: the plan of rows stays damaged, or cannot be read or replaced. "
        f"Look after the disk, or name another folder with data.cache_dir"
    )


def read_rows(
    sources: dict[str, Rows], which: np.ndarray, numbers: np.ndarray
) -> Batch:
    """Read rows of several sources as one batch.

    Args:
        sources: rows of one length, by the source's name.
        which: int64 [n], the place of each row's source among them; -1 is padding.
        numbers: int64 [n], which of its source's rows it is.

    Raises:
        DataError: a chunk is missing or damaged; source and rows are named.
    """
    length = next(iter(sources.values())).length
    batch = padding(len(which), length)
    for source, (name, rows) in enumerate(sources.items()):
        mine = np.flatnonzero(which == source)
        if not len(mine):
            continue
        try:
            part = rows.read(numbers[mine])
        except DataError as error:
            first = ", ".join(map(str, numbers[mine][:8].tolist()))
            more = ", ..." if len(mine) > 8 else ""
            raise DataError(
                f"source {name}, reading rows {first}{more}: {error}"
            ) from error
        if len(mine) == len(which):
            return part
        for field, values in zip(batch, part, strict=True):
            field[mine] = values
    return batch
