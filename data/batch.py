"""The arrays of a batch of rows, and the pieces of text in a row."""

from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Rows of T tokens and their targets, all int32 [rows, T].

    They are NumPy arrays on the host and JAX arrays on the devices.

    inputs: token ids.
    targets: the token that follows each input, or -1 if there is nothing to predict.
    segment_ids: the document's number within the row, from 1; 0 is padding.
    positions: count from 0 at each document's first token within the row.
    """

    inputs: Any
    targets: Any
    segment_ids: Any
    positions: Any


def padding_batch(num_rows: int, length: int) -> Batch:
    """Return a batch that holds only padding."""
    batch = Batch(*np.zeros((4, num_rows, length), np.int32))
    batch.targets[:] = -1
    return batch


class Piece(NamedTuple):
    """Consecutive tokens of a split that are placed in one row.

    column: the piece's first position in the row.
    start: the index in the split of its first target, if documents begin with a
        beginning token. Otherwise, the index of its first input.
    length: the number of positions.
    """

    column: int
    start: int
    length: int


def cut_rows(batch: Batch, part_B: np.ndarray, length: int) -> Batch:
    """Return one part of each row: part i has positions [i length, (i + 1) length).

    `part_B` is int64 [rows]. In a part, the positions of its first document start at 0.
    """
    row_length = batch.inputs.shape[1]
    if length == row_length:
        return batch
    columns = part_B[:, None] * length + np.arange(length)
    batch = Batch(*(np.take_along_axis(x, columns, axis=1) for x in batch))
    segments = batch.segment_ids
    positions = batch.positions
    is_first = (segments == segments[:, :1]) & (segments > 0)
    starts = np.where(is_first, positions[:, :1], 0)
    first_segment = np.maximum(segments[:, :1] - 1, 0)
    return batch._replace(
        segment_ids=np.where(segments > 0, segments - first_segment, 0),
        positions=positions - starts,
    )


def expand_groups(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each member's group number and index within the group: int64 [members].

    Group g has sizes[g] members. Sizes of 2, 0 and 3 give groups 0 0 2 2 2 and indices
    0 1 0 1 2.
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    return group, np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
