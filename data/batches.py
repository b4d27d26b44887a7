"""Rows of a token store as batches: batch s is a function of (config, seed, s).

Row r covers the tokens [r*T, r*T + T] of the flat array; its last token is the next
row's first, so that each token is a target once. Grain shuffles the rows of each
epoch anew, by index alone, and batch s is the s-th piece of that endless order: any
batch costs the same to reach, a process looks up and reads only its own rows, and any
division of the rows over processes gives the same batch.
Reading runs ahead of the consumer in threads, bounded by `prefetch` batches; they end
with the iterator, and never keep the process alive.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from data.config import DataConfig
from data.corpus import Split
from data.errors import DataError
from data.reader import TokenArray
from data.store import Store

Rows = slice | Sequence[slice] | None
# Of a split in memory one thread reads faster than several that share the GIL.
_THREADS_IN_MEMORY, _THREADS_ON_DISK = 1, 4


class Batch(NamedTuple):
    """Rows of T tokens and what they predict; all int32 [rows, T].

    numpy arrays here; whatever holds them once they have left the host.
    """

    inputs: Any
    targets: Any  # the token that follows each input; -1: none to be learnt
    segment_ids: Any  # 1, 2, ... by document within the row; 0 is padding
    positions: Any  # from 0 at each document's first token within the row


def train_batches(
    store: Store,
    config: DataConfig,
    seed: int,
    start_step: int = 0,
    rows: Rows = None,
) -> Iterator[Batch]:
    """Read the training batches start_step, start_step + 1, ... without end.

    Args:
        store: what `prepare(config)` gave.
        config: sequence_length, batch_size, document_mask and prefetch are read.
        seed: decides the order of the rows.
        start_step: the first batch; a later one costs no more than an earlier one.
        rows: which rows of each global batch to read, in this order; None is all.

    Raises:
        DataError: the text is too short for one batch, or a chunk is damaged.
    """
    order = _row_order(store, config, seed)
    read = _batch_reader(order, store.split("train"), config, rows)
    return _prefetch(read, range(start_step, sys.maxsize), store.split("train"), config)


def train_batch(
    store: Store, config: DataConfig, seed: int, step: int, rows: Rows = None
) -> Batch:
    """Read training batch `step` alone; equal to what `train_batches` yields for it.

    Raises:
        DataError: the text is too short for one batch, or a chunk is damaged.
    """
    order = _row_order(store, config, seed)
    return _batch_reader(order, store.split("train"), config, rows)(step)


def validation_batches(
    store: Store, config: DataConfig, num_batches: int = -1, rows: Rows = None
) -> Iterator[Batch]:
    """Read the validation text in order; each token but the first is a target once.

    The last row and the last batch are filled up with padding (segment 0, target -1),
    so that all batches have one shape.

    Args:
        store: what `prepare(config)` gave.
        config: sequence_length, batch_size, document_mask and prefetch are read.
        num_batches: how many at most; -1 reads all.
        rows: which rows of each global batch to read, in this order; None is all.

    Raises:
        DataError: the text is too short for one target, or a chunk is damaged.
    """
    tokens = store.split("validation")
    num_rows = -(-(len(tokens) - 1) // config.sequence_length)
    if num_rows < 1:
        raise DataError(
            f"{store.path}: validation has {len(tokens)} tokens, but a target needs 2. "
            f"Give more text or increase data.validation={config.validation}"
        )
    available = -(-num_rows // config.batch_size)
    count = available if num_batches < 0 else min(num_batches, available)
    order = grain.MapDataset.range(count * config.batch_size)
    read = _batch_reader(order, tokens, config, rows)
    return _prefetch(read, range(count), tokens, config)


def num_rows(store: Store, config: DataConfig, split: Split = "train") -> int:
    """Count a split's whole rows: what one epoch of training goes through."""
    return max(0, (store.num_tokens(split) - 1) // config.sequence_length)


def cut_rows(
    tokens: np.ndarray, starts: np.ndarray, offsets: np.ndarray, document_mask: bool
) -> Batch:
    """Turn rows of T+1 tokens into inputs and targets that respect the documents.

    Args:
        tokens: int32 [rows, T+1].
        starts: int64 [rows], where each row starts in the flat array.
        offsets: int64 [documents + 1], where each document starts there, then the
            end: what lies behind it is padding.
        document_mask: whether a new document has a segment of its own, and is not
            predicted from the one before it.
    """
    num_rows, length = tokens.shape[0], tokens.shape[1] - 1
    targets = tokens[:, 1:].copy()
    columns = np.arange(length, dtype=np.int32)
    positions = np.tile(columns, (num_rows, 1))
    segment_ids = np.ones_like(positions)
    if document_mask:
        # The documents that start behind a row's first token, up to its last target.
        first = np.searchsorted(offsets, starts, "right")
        last = np.searchsorted(offsets, starts + length, "right")
        counts = last - first
        row = np.repeat(np.arange(num_rows), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        column = offsets[np.repeat(first, counts) + nth] - starts[row]
        targets[row, column - 1] = -1
        row, column = row[column < length], column[column < length]
        begins = np.zeros_like(positions)
        begins[row, column] = 1
        segment_ids += np.cumsum(begins, axis=1, dtype=np.int32)
        begins[row, column] = column
        positions -= np.maximum.accumulate(begins, axis=1)
    inputs = tokens[:, :-1].copy()
    left = offsets[-1] - starts
    if (left <= length).any():
        padding = columns >= left[:, None] - 1
        targets[padding] = -1
        for array in (inputs, segment_ids, positions):
            array[padding] = 0
    return Batch(inputs, targets, segment_ids, positions)


def _row_order(store: Store, config: DataConfig, seed: int) -> grain.MapDataset:
    """Order the row numbers, epoch after epoch without end, each in its own order."""
    available = num_rows(store, config)
    if available < config.batch_size:
        raise DataError(
            f"{store.path}: the training text has {store.num_tokens('train')} tokens, "
            f"which are {available} rows of data.sequence_length="
            f"{config.sequence_length}, but a batch needs data.batch_size="
            f"{config.batch_size}. Use shorter sequences, a smaller batch or more text"
        )
    # Grain shuffles epoch e with seed + e: neighbouring seeds would share epochs.
    # Source: grain 0.2.18, dataset/transformations/shuffle.py, `_shuffled_index`.
    digest = hashlib.sha256(f"order of rows, seed {seed}".encode()).digest()
    order = grain.MapDataset.range(available)
    return order.shuffle(seed=int.from_bytes(digest[:4])).repeat(None)


def _batch_reader(
    order: grain.MapDataset, tokens: TokenArray, config: DataConfig, rows: Rows
) -> Callable[[int], Batch]:
    """Make the function from a step to the chosen rows of its global batch."""
    length = config.sequence_length
    parts = [slice(None)] if rows is None else rows
    parts = [parts] if isinstance(parts, slice) else parts
    in_batch = np.arange(config.batch_size)
    chosen = np.concatenate([in_batch[part] for part in parts]).tolist()

    def read(step: int) -> Batch:
        first = step * config.batch_size
        row_ids = [order[first + row] for row in chosen]
        starts = np.array(row_ids, np.int64) * length
        found = tokens.read_rows(starts, length + 1)
        return cut_rows(found, starts, tokens.offsets, config.document_mask)

    return read


def _prefetch(
    read: Callable[[int], Batch], steps: range, tokens: TokenArray, config: DataConfig
) -> Iterator[Batch]:
    threads = _THREADS_IN_MEMORY if tokens.in_memory else _THREADS_ON_DISK
    options = grain.ReadOptions(min(threads, config.prefetch), config.prefetch)
    batches = grain.MapDataset.range(steps.start, steps.stop).map(read)
    return iter(batches.to_iter_dataset(options))
