"""Rows of T positions from one split of a store, each read by its number.

A row has inputs, the targets that follow them, segment ids, and positions that begin at
0 with each document. `Concatenated` rows join all tokens end to end. `Packed` rows hold
document pieces, which a plan assigns to rows.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from data.batch import Batch, Piece, padding_batch
from data.config import DataConfig, Packing
from data.errors import DataError
from data.packed_rows import Packed, open_plan
from data.text.files import Split
from data.token_store.reader import TokenArray
from data.token_store.store import Store

_PLAN_VERSION = 3


class Concatenated:
    """Rows that join all tokens: row r covers tokens r T to r T + T, both included.

    The last token of a row is only a target; it is also the next row's first input.
    """

    def __init__(
        self, tokens: TokenArray, length: int, count: int, document_mask: bool
    ):
        """Divide the tokens into `count` rows of `length` positions."""
        self._tokens, self.length, self._count = tokens, length, count
        self._document_mask = document_mask

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: np.ndarray) -> Batch:
        """Read rows by number, int64 [n]; raise DataError if a chunk is damaged."""
        starts = numbers * self.length
        lengths = np.minimum(len(self._tokens) - starts, self.length + 1)
        tokens = np.zeros((len(numbers), self.length + 1), np.int32)
        is_token = np.arange(self.length + 1) < lengths[:, None]
        tokens[is_token] = np.concatenate(self._tokens.gather(starts, lengths))
        document_rows = document_columns = np.zeros(0, np.int64)
        if self._document_mask:
            document_rows, document_starts = self._tokens.starts_within(
                starts, starts + self.length
            )
            document_columns = document_starts - starts[document_rows]
        num_remaining = len(self._tokens) - starts
        return make_batch(tokens, document_rows, document_columns, num_remaining)

    def pieces(self, number: int) -> list[Piece]:
        """List the pieces of a row, one for each document."""
        start = number * self.length
        stop = min(start + self.length, len(self._tokens) - 1)
        _, starts = self._tokens.starts_within(np.array([start]), np.array([stop - 1]))
        bounds = [start, *starts.tolist(), stop]
        return [Piece(a - start, a, b - a) for a, b in pairwise(bounds) if b > a]


def make_batch(
    tokens: np.ndarray,
    document_rows: np.ndarray,
    document_columns: np.ndarray,
    num_remaining: np.ndarray,
) -> Batch:
    """Make a batch from rows of T+1 tokens. No target is a document's first token.

    Args:
        tokens: int32 [rows, T+1].
        document_rows: int64 [n], the row of each document start after column 0.
        document_columns: int64 [n], the column of that start, from 1 to T.
        num_remaining: int64 [rows], the number of tokens from each row's start to the
            split's end. A row with fewer than T+1 tokens ends with padding.
    """
    num_rows, length = tokens.shape[0], tokens.shape[1] - 1
    targets = tokens[:, 1:].copy()
    columns = np.arange(length, dtype=np.int32)
    positions = np.tile(columns, (num_rows, 1))
    segment_ids = np.ones_like(positions)
    if len(document_rows):
        targets[document_rows, document_columns - 1] = -1
        is_input = document_columns < length
        document_rows = document_rows[is_input]
        document_columns = document_columns[is_input]
        start_columns = np.zeros_like(positions)
        start_columns[document_rows, document_columns] = document_columns
        segment_ids += np.cumsum(start_columns > 0, axis=1, dtype=np.int32)
        positions -= np.maximum.accumulate(start_columns, axis=1)
    inputs = tokens[:, :-1].copy()
    if (num_remaining <= length).any():
        is_padding = columns >= num_remaining[:, None] - 1
        targets[is_padding] = -1
        for array in (inputs, segment_ids, positions):
            array[is_padding] = 0
    return Batch(inputs, targets, segment_ids, positions)


Rows = Concatenated | Packed


def open_rows(
    store: Store, config: DataConfig, split: Split, cache: Path, pad: bool = False
) -> Rows:
    """Open the rows of a split, packed as the config says.

    `cache` is the folder of plans. With `pad`, `concat` packing also has the last,
    incomplete row. Raises DataError if the store is damaged or no plan can be written.
    """
    tokens, length = store.split(split), config.sequence_length
    if config.packing is Packing.concat:
        num_pairs = max(0, len(tokens) - 1)
        count = -(-num_pairs // length) if pad else num_pairs // length
        return Concatenated(tokens, length, count, config.document_mask)
    name = f"{store.fingerprint[:16]}-{split}-{config.packing}-{length}"
    file = cache / f"{name}-v{_PLAN_VERSION}.npz"
    return Packed(tokens, length, open_plan(tokens, length, config.packing, file))


def read_rows(
    sources: dict[str, Rows], source_of_row: np.ndarray, numbers: np.ndarray
) -> Batch:
    """Read rows of several sources as one batch.

    `source_of_row` is int64 [n], the index of each row's source, or -1 for padding.
    `numbers` is int64 [n], the number of each row in its source. Raises DataError,
    which names the source and the rows, if a chunk is damaged.
    """
    length = next(iter(sources.values())).length
    batch = padding_batch(len(source_of_row), length)
    for source_index, (name, rows) in enumerate(sources.items()):
        row_indices = np.flatnonzero(source_of_row == source_index)
        if not len(row_indices):
            continue
        try:
            source_batch = rows.read(numbers[row_indices])
        except DataError as error:
            row_list = ", ".join(map(str, numbers[row_indices][:8].tolist()))
            ellipsis = ", ..." if len(row_indices) > 8 else ""
            location = f"source {name}, reading rows {row_list}{ellipsis}"
            raise DataError(f"{location}: {error}") from error
        if len(row_indices) == len(source_of_row):
            return source_batch
        for field, values in zip(batch, source_batch, strict=True):
            field[row_indices] = values
    return batch
