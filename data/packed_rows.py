"""Rows of document pieces. A plan, computed once and cached, assigns pieces to rows.

The cached plan is a zip archive with checksums. A damaged plan is computed again.
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import packing
from data.batch import Batch, Piece, expand_groups, padding_batch
from data.config import Packing
from data.errors import DataError
from data.storage import check_regular, created_atomically
from data.token_store.reader import TokenArray

log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The pieces by row. Row r holds pieces row_offsets[r] to row_offsets[r+1] - 1.

    starts: int64 [pieces], the index in the split of each piece's first target.
    lengths: int32 [pieces], the number of each piece's targets.
    is_start: bool [pieces], whether the first target is the first token of a document.
    row_offsets: int64 [rows + 1].
    """

    starts: np.ndarray
    lengths: np.ndarray
    is_start: np.ndarray
    row_offsets: np.ndarray


class Packed:
    """Rows of `length` positions that hold the pieces which a plan assigns to them."""

    def __init__(
        self, tokens: TokenArray, length: int, plan: Plan, beginning: int | None
    ):
        """Make rows of the pieces of `tokens` that the plan lists.

        `beginning` is the token that precedes each document; None if there is none.
        """
        self._tokens = tokens
        self.length = length
        self._plan = plan
        self._beginning = beginning

    def __len__(self) -> int:
        return len(self._plan.row_offsets) - 1

    def read(self, numbers: np.ndarray) -> Batch:
        """Read rows by number."""
        first_pieces = self._plan.row_offsets[numbers]
        num_pieces = self._plan.row_offsets[numbers + 1] - first_pieces
        row, index_in_row = expand_groups(num_pieces)
        piece_numbers = first_pieces[row] + index_in_row
        lengths = self._plan.lengths[piece_numbers].astype(np.int64)
        is_start = self._plan.is_start[piece_numbers]
        # The token before a piece is its first input, but not at a document's start.
        num_before = np.where(is_start, 0, 1)
        starts = self._plan.starts[piece_numbers] - num_before
        tokens = self._tokens.gather(starts, lengths + num_before)
        pairs = zip(tokens, num_before, strict=True)
        targets = np.concatenate([piece[before:] for piece, before in pairs])
        inputs = np.roll(targets, 1).astype(np.int32)
        first_inputs = np.array([piece[0] for piece in tokens], np.int32)
        if self._beginning is not None:
            first_inputs[is_start] = self._beginning
        inputs[np.cumsum(lengths) - lengths] = first_inputs
        batch = padding_batch(len(numbers), self.length)
        num_inputs = np.bincount(row, lengths, len(numbers))
        is_text = np.arange(self.length) < num_inputs[:, None]
        batch.inputs[is_text] = inputs
        batch.targets[is_text] = targets
        batch.segment_ids[is_text] = np.repeat(index_in_row + 1, lengths)
        batch.positions[is_text] = expand_groups(lengths)[1]
        return batch

    def pieces(self, number: int) -> list[Piece]:
        """List the pieces of a row."""
        span = slice(*self._plan.row_offsets[number : number + 2])
        starts = self._plan.starts[span]
        lengths = self._plan.lengths[span].tolist()
        starts = starts - (self._beginning is None)
        columns = np.cumsum([0, *lengths[:-1]]).tolist()
        return list(map(Piece, columns, starts.tolist(), lengths))


def make_plan(
    offsets: np.ndarray, length: int, kind: Packing, first_target: int
) -> Plan:
    """Assign documents to rows; the arguments are as in `packing.cut_documents`."""
    starts, lengths, is_start = packing.cut_documents(offsets, length, first_target)
    if kind is Packing.none:
        return Plan(starts, lengths, is_start, np.arange(len(starts) + 1))
    assert kind is Packing.best_fit
    order, row_offsets = packing.pack(lengths, length)
    return Plan(starts[order], lengths[order], is_start[order], row_offsets)


def open_plan(
    tokens: TokenArray, length: int, kind: Packing, first_target: int, file: Path
) -> Plan:
    """Read a plan from its file; compute and write it if it is missing or damaged.

    Raises DataError if the plan cannot be written.
    """
    if file.exists():
        try:
            check_regular(file)
            with np.load(file) as arrays:
                return Plan(**arrays)
        except Exception as error:  # zipfile may raise any exception
            message = "%s: this plan of rows is damaged (%s) and is computed again"
            log.warning(message, file, error)
    start_s = time.monotonic()
    plan = make_plan(tokens.offsets, length, kind, first_target)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with created_atomically(file) as partial, partial.open("wb") as output:
            np.savez(output, **plan._asdict())
    except OSError as error:
        raise DataError(
            f"{file}: the plan of rows cannot be written ({error}). Name a "
            f"writable folder with data.cache_dir"
        ) from error
    num_pieces = len(plan.starts)
    num_rows = len(plan.row_offsets) - 1
    filled_fraction = plan.lengths.sum(dtype=np.int64) / max(1, num_rows * length)
    log.info(
        f"{kind} rows: {num_pieces} pieces in {num_rows} rows of {length}, "
        f"{filled_fraction:.1%} filled, {time.monotonic() - start_s:.1f} s"
    )
    return plan
