"""Rows of T positions from one split of a store, each read by its number.

A row has inputs, the targets that follow them, segment ids, and positions that begin at
0 with each document. `Concatenated` rows join all tokens end to end. `Packed` rows hold
document pieces, which a plan assigns to rows.

A document of m tokens has m positions. Its targets are all its tokens, and its inputs
are the beginning token and all its tokens but the last. A row or a piece that continues
a document begins with the token before its first target. With
`data.document_start=false`, documents have no beginning token, so that the first token
of a document is no target.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from data.batch import Batch, Piece, padding_batch
from data.beginning import beginning_token
from data.config import DataConfig, Packing
from data.errors import DataError
from data.packed_rows import Packed, open_plan
from data.splits import Split
from data.token_store.reader import TokenArray
from data.token_store.store import Store

_PLAN_VERSION = 4


class Concatenated:
    """Rows that join all tokens end to end.

    The targets of row r are the tokens r T to r T + T - 1, or one token later if
    documents have no beginning token. The last target is also the next row's first
    input, unless the next row begins with a document.
    """

    def __init__(
        self,
        tokens: TokenArray,
        length: int,
        pad: bool,
        document_mask: bool,
        beginning: int | None,
    ):
        """Divide the tokens into rows of `length` positions.

        With `pad`, there is also a last, incomplete row. `beginning` is the token that
        precedes each document; None if there is none.
        """
        self._tokens = tokens
        self.length = length
        self._document_mask = document_mask
        self._beginning = beginning
        self._first_target = int(beginning is None)
        num_targets = max(0, len(tokens) - self._first_target)
        self._count = -(-num_targets // length) if pad else num_targets // length

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: np.ndarray) -> Batch:
        """Read rows by number, int64 [n]; raise DataError if a chunk is damaged."""
        # The index of each row's first input: -1 is before the split's first token.
        starts = numbers * self.length + self._first_target - 1
        stops = np.minimum(starts + self.length + 1, len(self._tokens))
        first_tokens = np.maximum(starts, 0)
        tokens = np.zeros((len(numbers), self.length + 1), np.int32)
        index = starts[:, None] + np.arange(self.length + 1)
        is_token = (index >= 0) & (index < stops[:, None])
        gathered = self._tokens.gather(first_tokens, stops - first_tokens)
        tokens[is_token] = np.concatenate(gathered)
        document_rows = document_columns = np.zeros(0, np.int64)
        if self._document_mask:
            document_rows, document_starts = self._tokens.starts_within(
                starts, starts + self.length
            )
            document_columns = document_starts - starts[document_rows]
        num_remaining = len(self._tokens) - starts
        return make_batch(
            tokens, document_rows, document_columns, num_remaining, self._beginning
        )

    def pieces(self, number: int) -> list[Piece]:
        """List the pieces of a row, one for each document."""
        start = number * self.length
        stop = min(start + self.length, len(self._tokens) - self._first_target)
        _, starts = self._tokens.starts_within(np.array([start]), np.array([stop - 1]))
        bounds = [start, *starts.tolist(), stop]
        return [Piece(a - start, a, b - a) for a, b in pairwise(bounds) if b > a]


def make_batch(
    tokens: np.ndarray,
    document_rows: np.ndarray,
    document_columns: np.ndarray,
    num_remaining: np.ndarray,
    beginning: int | None,
) -> Batch:
    """Make a batch from rows of T+1 tokens.

    Args:
        tokens: int32 [rows, T+1].
        document_rows: int64 [n], the row of each document start after column 0.
        document_columns: int64 [n], the column of that start, from 1 to T.
        num_remaining: int64 [rows], the number of tokens from each row's start to the
            split's end. A row with fewer than T+1 tokens ends with padding.
        beginning: the input whose target is a document's first token. With None, that
            token is no target.
    """
    num_rows = tokens.shape[0]
    length = tokens.shape[1] - 1
    inputs = tokens[:, :-1].copy()
    targets = tokens[:, 1:].copy()
    columns = np.arange(length, dtype=np.int32)
    positions = np.tile(columns, (num_rows, 1))
    segment_ids = np.ones_like(positions)
    if len(document_rows):
        if beginning is None:
            targets[document_rows, document_columns - 1] = -1
        else:  # A segment begins with the beginning token, one position earlier.
            document_columns = document_columns - 1
            inputs[document_rows, document_columns] = beginning
        is_input = document_columns < length
        document_rows = document_rows[is_input]
        document_columns = document_columns[is_input]
        start_columns = np.zeros_like(positions)
        start_columns[document_rows, document_columns] = document_columns
        segment_ids += np.cumsum(start_columns > 0, axis=1, dtype=np.int32)
        positions -= np.maximum.accumulate(start_columns, axis=1)
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
    tokens = store.split(split)
    length = config.sequence_length
    has_beginning = config.has_beginning_tokens
    beginning = beginning_token(store.encoding) if has_beginning else None
    if config.packing is Packing.concat:
        return Concatenated(tokens, length, pad, config.document_mask, beginning)
    first_target = int(beginning is None)
    name = f"{store.fingerprint[:16]}-{split}-{config.packing}-{length}-{first_target}"
    file = cache / f"{name}-v{_PLAN_VERSION}.npz"
    plan = open_plan(tokens, length, config.packing, first_target, file)
    return Packed(tokens, length, plan, beginning)


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
