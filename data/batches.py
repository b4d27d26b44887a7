"""Rows as batches: batch s is a function of (config, seed, s).

Row n of a run is row k of a source: which, the mixture's order says (data/mixture.py),
and the order of a source's own rows is Grain's shuffle of their numbers, another one
each epoch. Batch s is the rows [s B, s B + B) of that endless order, so any batch
costs the same to reach, a process looks up and reads only its own rows, and any
division of the rows over processes gives the same batch. Nothing need be remembered.
Step s trains on batch s, or with `data.skip_batches` on a later one: the batches left
out keep their numbers and rows, so that the others are what they would be without.
Reading runs ahead of the consumer in threads, bounded by `prefetch` batches; they end
with the iterator, and never keep the process alive.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.config import DataConfig, Mistakes, Source
from data.encoding import decode
from data.errors import DataError
from data.mixture import Mixture
from data.rows import Batch, Rows, open_rows, read_rows
from data.sources import Sources
from data.text.files import Split

__all__ = ["Batch", "Order", "batch_number", "validation_batches"]

RowSlices = slice | Sequence[slice] | None
# Of local splits one thread reads small batches faster than two that share the GIL, and
# asks the disk for all of a batch at once; large ones are mostly copied, without it. So
# is what is far away waited for (docs/log.md).
_THREADS_SMALL, _THREADS_LARGE, _THREADS_REMOTE = 1, 2, 4
_LARGE = 2**20  # tokens of a batch


class Excerpt(NamedTuple):
    """A stretch of a document that stands in a batch."""

    row: int  # of the batch
    column: int
    source: str
    document: str  # its id
    number: int  # of the document in the split
    first: int  # token of the document
    text: str  # decoded inputs


class Order:
    """Which rows of which sources make up which training batch."""

    def __init__(self, sources: Sources, config: DataConfig, seed: int):
        """Open the rows of all sources; a DataError says that they are too few."""
        self._config, self._sources = config, sources
        self.rows, self._local = _open(sources, config, "train")
        counts = {name: len(rows) for name, rows in self.rows.items()}
        if sum(counts.values()) < config.batch_size or 0 in counts.values():
            have = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DataError(
                f"{sources.path}: the training text has {sources.num_tokens('train')} "
                f"tokens, which are this many rows of data.sequence_length="
                f"{config.sequence_length}: {have}; but a batch needs data.batch_size="
                f"{config.batch_size}, and each source one. Use shorter sequences, a "
                f"smaller batch or more text"
            )
        self._mixture = Mixture(list(counts), _stretches(config, list(counts)))
        several = len(self.rows) > 1
        self._seeds = [_seed_of(seed, name if several else None) for name in self.rows]

    def epochs(self, num_steps: int) -> dict[str, float]:
        """Compute how often the rows of each source come in the first steps.

        Rows of batches that are left out count: those of later batches stay the same.
        """
        num_batches = self.batch_number(num_steps - 1) + 1 if num_steps else 0
        given = self._mixture.counts(num_batches * self._config.batch_size).tolist()
        of_source = zip(self.rows.items(), given, strict=True)
        return {name: count / len(rows) for (name, rows), count in of_source}

    def mistakes(self, num_steps: int) -> Mistakes:
        """List the sources that end before num_steps."""
        mistakes: Mistakes = []
        for name, used in self.epochs(num_steps).items():
            limit = self._limit(name)
            if used > limit:
                rule = (
                    f"are too few: {num_steps} steps use {name} {used:.2f} times; "
                    f"allow more, lower its weight, or drop it by weight_changes"
                )
                mistakes.append((f"data.sources.{name}.epochs", limit, rule))
        return mistakes

    def batch_number(self, step: int) -> int:
        """Number the batch of a step: so many precede it, with those left out."""
        return batch_number(step, self._config.skip_batches)

    def find(self, step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up rows of a batch: which source, and which of its rows; int64 [n]."""
        before = self.batch_number(step) * self._config.batch_size
        which, rank = self._mixture.rows(before + rows)
        numbers = np.zeros_like(rank)
        for source, (name, own) in enumerate(self.rows.items()):
            mine, limit = which == source, self._limit(name)
            if (rank[mine] >= limit * len(own)).any():
                raise DataError(
                    f"step {step}: data.sources.{name} is used up after {limit} "
                    f"epochs. Allow more, or give it no weight"
                )
            numbers[mine] = shuffled(rank[mine], len(own), self._seeds[source])
        return which, numbers

    def read(self, step: int, rows: RowSlices = None) -> Batch:
        """Read the chosen rows of a batch; damage is named by step, source and row."""
        which, numbers = self.find(step, _chosen(self._config, rows))
        try:
            return read_rows(self.rows, which, numbers)
        except DataError as error:
            raise DataError(f"step {step}, {error}") from error

    def batches(
        self, start_step: int = 0, rows: RowSlices = None, stop_step: int = sys.maxsize
    ) -> Iterator[Batch]:
        """Read the batches from start_step on, before stop_step, ahead of time.

        A DataError says that a chunk is damaged, or a source with a limit used up.
        """
        steps = range(start_step, stop_step)
        read = functools.partial(self.read, rows=rows)
        num_rows = len(_chosen(self._config, rows))
        return _prefetch(read, steps, self._local, num_rows, self._config)

    def excerpts(self, step: int) -> Iterator[Excerpt]:
        """Read which documents make up a batch, row by row."""
        which, numbers = self.find(step, np.arange(self._config.batch_size))
        names = [list(self.rows)[source] for source in which]
        for row, (name, number) in enumerate(zip(names, numbers, strict=True)):
            store = self._sources.stores[name]
            tokens = store.split("train")
            for column, start, length in self.rows[name].pieces(int(number)):
                document, begin, _ = tokens.document_at(start)
                text = decode(store.encoding, tokens.read(start, start + length))
                key, first = tokens.document_id(document), start - begin
                yield Excerpt(row, column, name, key, document, first, text)

    def _limit(self, name: str) -> float:
        source = self._config.sources.get(name)
        return math.inf if source is None or source.epochs is None else source.epochs


def batch_number(step: int, skip_batches: Sequence[int]) -> int:
    """Number the batch of a step, where `data.skip_batches` are left out."""
    number, judged = step, 0  # batches below `judged` are left out or counted
    for first, last in zip(skip_batches[::2], skip_batches[1::2], strict=True):
        first = max(first, judged)
        if number >= first:
            number += last + 1 - first
        judged = last + 1
    return number


def validation_batches(
    sources: Sources, config: DataConfig, num_batches: int = -1, rows: RowSlices = None
) -> Iterator[Batch]:
    """Read the held out text in order; each token but the first is a target once.

    The rows of several sources take turns in proportion to their numbers. The last
    batch is filled up with padding (segment 0, target -1), so that all batches have one
    shape. `num_batches` is how many at most, -1 all; `rows` which rows of each global
    batch to read, in this order, None all.
    """
    readers, local = _open(sources, config, sources.held_out, pad=True)
    counts = [len(reader) for reader in readers.values()]
    available = -(-sum(counts) // config.batch_size)
    count = available if num_batches < 0 else min(num_batches, available)
    turns = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    by_turn = np.argsort(turns, kind="stable")
    padding = (0, available * config.batch_size - len(turns))
    which = np.repeat(np.arange(len(counts)), counts)[by_turn]
    which = np.pad(which, padding, constant_values=-1)
    numbers = np.concatenate([np.arange(n) for n in counts])[by_turn]
    numbers = np.pad(numbers, padding)
    chosen = _chosen(config, rows)

    def read(step: int) -> Batch:
        places = step * config.batch_size + chosen
        return read_rows(readers, which[places], numbers[places])

    return _prefetch(read, range(count), local, len(chosen), config)


def _open(
    sources: Sources, config: DataConfig, split: Split, pad: bool = False
) -> tuple[dict[str, Rows], bool]:
    """Open a split's rows by their source; are all of them in memory?"""
    rows = {
        name: open_rows(store, config, split, sources.cache, pad)
        for name, store in sources.stores.items()
    }
    stores = sources.stores.values()
    return rows, all(store.split(split).is_local for store in stores)


def _stretches(
    config: DataConfig, names: list[str]
) -> list[tuple[int, dict[str, float]]]:
    if config.source is not Source.mixture:
        return [(0, dict.fromkeys(names, 1.0))]
    weights = {name: source.weight for name, source in config.sources.items()}
    changes = [(c.step * config.batch_size, c.weights) for c in config.weight_changes]
    return [(0, weights), *changes]


def shuffled(ranks: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the rows at some places of a source's training order; both int64 [n].

    Epoch after epoch of `count` rows without end, each in an order of its own.
    Source: grain 0.2.18, `MapDataset.shuffle`, which takes six times as long a row.
    """
    from grain.experimental import index_shuffle  # slow: not before the step compiles

    epochs, places = np.divmod(ranks, count)
    seeds = ((seed + epochs) % 2**32).tolist()
    pairs = zip(places.tolist(), seeds, strict=True)
    numbers = [index_shuffle(place, count - 1, own, 4) for place, own in pairs]
    return np.array(numbers, np.int64)


def _seed_of(seed: int, name: str | None) -> int:
    """Return the seed of a source's order; of one that is alone, without its name."""
    # The seed of epoch e is this plus e: neighbouring seeds would share epochs.
    of_source = "" if name is None else f" of {name}"
    digest = hashlib.sha256(f"order of rows{of_source}, seed {seed}".encode()).digest()
    return int.from_bytes(digest[:4])


def _chosen(config: DataConfig, rows: RowSlices) -> np.ndarray:
    rows = slice(None) if rows is None else rows
    parts = [rows] if isinstance(rows, slice) else rows
    return np.concatenate([np.arange(config.batch_size)[part] for part in parts])


def _prefetch(
    read: Callable[[int], Batch],
    steps: range,
    local: bool,
    num_rows: int,
    config: DataConfig,
) -> Iterator[Batch]:
    import grain

    threads = _THREADS_REMOTE
    if local:
        large = num_rows * config.sequence_length >= _LARGE
        threads = _THREADS_LARGE if large else _THREADS_SMALL
    options = grain.ReadOptions(min(threads, config.prefetch), config.prefetch)
    batches = grain.MapDataset.range(steps.start, steps.stop).map(read)
    return iter(batches.to_iter_dataset(options))
