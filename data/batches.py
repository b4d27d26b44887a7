"""Batches of rows: batch s is a function of (config, seed, s).

The mixture says from which source each row of the run comes (data/mixture.py). Grain
shuffles the row numbers of each source, in a different order each epoch. Batches are
consecutive rows of the mixture (data/phases.py). Therefore any batch can be looked up
in constant time, and a checkpoint need not save a data position. Each process reads
only its local rows, and the batches do not depend on the number of processes.

Step s trains on batch s, or on a later batch if `data.skip_batches` is set. A skipped
batch keeps its number and its rows, so the contents of all other batches do not change.

Threads read up to `data.prefetch` batches ahead. They end when their iterator is
deleted, and they do not keep the process from exiting.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data.batch import Batch, cut_rows, expand_groups
from data.config import DataConfig, Source
from data.errors import DataError, Mistake
from data.mixture import Mixture
from data.phases import Phase, phase_at, phases_of
from data.phases import batch_number as batch_number
from data.rows import Rows, open_rows, read_rows
from data.shuffle import seed_of, shuffled_rows
from data.sources import Sources
from data.splits import Split

RowSlices = slice | Sequence[slice] | None
# One thread reads small batches of a local split faster than two that share the GIL.
# Reading a large batch is mostly copying, and reading a remote batch is mostly waiting.
# Both release the GIL. The measurements are in docs/log/data.md.
_THREADS_SMALL = 1
_THREADS_LARGE = 2
_THREADS_REMOTE = 4
_LARGE_BATCH_TOKENS = 2**20
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Order:
    """The order of training rows: which rows of which sources are in which batch."""

    def __init__(self, sources: Sources, config: DataConfig, seed: int):
        """Open the rows of all sources.

        Raises DataError if their rows do not fill a batch, or a source has no row.
        """
        self._config = config
        self.sources = sources
        self.rows, self._is_local = _open_split(sources, config, "train")
        self.phases = phases_of(config)
        num_rows = {name: len(rows) for name, rows in self.rows.items()}
        most_tokens = max(phase.tokens_per_batch for phase in self.phases)
        needed = -(-most_tokens // config.sequence_length)
        if sum(num_rows.values()) < needed or 0 in num_rows.values():
            rows = ", ".join(f"{name} {count}" for name, count in num_rows.items())
            raise DataError(
                f"{sources.path}: the training text has {sources.num_tokens('train')} "
                f"tokens. With data.sequence_length={config.sequence_length} it has "
                f"this number of rows: {rows}. A batch needs {needed} rows "
                f"(data.batch_size, data.batch_schedule), and each source needs one. "
                f"Use shorter sequences, a smaller batch or more text"
            )
        self._mixture = Mixture(list(num_rows), self._weights_by_row(list(num_rows)))
        is_single = len(self.rows) == 1
        self._seeds = [seed_of(seed, None if is_single else n) for n in self.rows]

    def epochs(self, num_steps: int) -> dict[str, float]:
        """Return how many epochs of each source the first `num_steps` steps use.

        The rows of skipped batches count as used.
        """
        num_batches = self.batch_number(num_steps - 1) + 1 if num_steps else 0
        rows_used = self._mixture.counts(self._first_row(num_batches)).tolist()
        return {
            name: count / len(rows)
            for (name, rows), count in zip(self.rows.items(), rows_used, strict=True)
        }

    def epoch_mistakes(self, num_steps: int) -> list[Mistake]:
        """List the sources whose limit of epochs is exceeded within `num_steps`."""
        mistakes = []
        for name, epochs in self.epochs(num_steps).items():
            max_epochs = self._max_epochs(name)
            if epochs > max_epochs:
                rule = f"are too few: {num_steps} steps use {name} {epochs:.2f} times; "
                rule += "allow more, lower its weight, or drop it by weight_changes"
                key = f"data.sources.{name}.epochs"
                mistakes.append(Mistake(key, max_epochs, rule))
        return mistakes

    def batch_number(self, step: int) -> int:
        """Return the number of the batch that a step trains on."""
        return batch_number(step, self._config.skip_batches)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step's batch."""
        return phase_at(self.phases, self.batch_number(step))

    def _first_row(self, batch: int) -> int:
        """Return the number of rows of which earlier batches have parts."""
        phase = phase_at(self.phases, batch)
        return -(-phase.part(batch) * phase.length // self._config.sequence_length)

    def find(
        self, step: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Look up some rows of a step's batch, by their indices in the batch.

        Args:
            step: the number of earlier updates.
            rows: int64 [n].

        Returns:
            Three arrays int64 [n]: the index of each row's source, the number of a row
            in that source, and which part of this row it is.

        Raises:
            DataError: a source exceeds its limit of epochs.
        """
        phase = self.phase(step)
        batch = self.batch_number(step)
        parts_per_row = self._config.sequence_length // phase.length
        row, part = np.divmod(phase.part(batch) + rows, parts_per_row)
        source_of_row, rank = self._mixture.rows(row)
        numbers = np.zeros_like(rank)
        for index, (name, source_rows) in enumerate(self.rows.items()):
            mask = source_of_row == index
            max_epochs = self._max_epochs(name)
            if (rank[mask] >= max_epochs * len(source_rows)).any():
                raise DataError(
                    f"step {step}: data.sources.{name} is used up after {max_epochs} "
                    f"epochs. Allow more, or give it no weight"
                )
            seed = self._seeds[index]
            numbers[mask] = shuffled_rows(rank[mask], len(source_rows), seed)
        return source_of_row, numbers, part

    def read(self, step: int, rows: RowSlices = None) -> Batch:
        """Read one or several slices of a step's batch, concatenated; None reads all.

        A DataError names the step, source and rows.
        """
        phase = self.phase(step)
        source_of_row, numbers, part = self.find(step, _row_indices(phase.rows, rows))
        try:
            batch = read_rows(self.rows, source_of_row, numbers)
        except DataError as error:
            raise DataError(f"step {step}, {error}") from error
        return cut_rows(batch, part, phase.length)

    def batches(
        self,
        start_step: int = 0,
        rows: Callable[[Phase], RowSlices] = lambda phase: None,
        stop_step: int = sys.maxsize,
    ) -> Iterator[Batch]:
        """Return an iterator over the steps' batches that reads ahead.

        `rows` returns one or several slices of the batches of a phase, which are
        concatenated; None selects all rows. The iterator raises DataError if a chunk is
        damaged, or a source exceeds its limit of epochs.
        """
        slices = {phase: rows(phase) for phase in self.phases}
        num_tokens = max(
            len(_row_indices(phase.rows, slices[phase])) * phase.length
            for phase in self.phases
        )

        def read(step: int) -> Batch:
            return self.read(step, slices[self.phase(step)])

        steps = range(start_step, stop_step)
        return _prefetch(read, steps, self._is_local, num_tokens, self._config)

    def _max_epochs(self, name: str) -> float:
        source = self._config.sources.get(name)
        return math.inf if source is None or source.epochs is None else source.epochs

    def _weights_by_row(self, names: list[str]) -> list[tuple[int, dict[str, float]]]:
        """Return the weights of a mixture, and the first row for which they hold."""
        config = self._config
        if config.source is not Source.mixture:
            return [(0, dict.fromkeys(names, 1.0))]
        weights = {name: source.weight for name, source in config.sources.items()}
        changes = [(self._first_row(c.step), c.weights) for c in config.weight_changes]
        return [(0, weights), *changes]


def validation_batches(
    sources: Sources, config: DataConfig, num_batches: int = -1, rows: RowSlices = None
) -> Iterator[Batch]:
    """Return an iterator over the validation text, or over a part of it, in order.

    With `num_batches=-1`, each pair of an input and a target occurs exactly once. The
    last batch ends with padding, so that all batches have the same shape. Fewer batches
    than there are hold rows that `spread_rows` chooses. Rows of several sources
    alternate in proportion to the sources' row counts. `rows` is as in `Order.read`.
    """
    readers, is_local = _open_split(sources, config, sources.held_out, pad=True)
    num_rows = np.array([len(reader) for reader in readers.values()])
    source_of_row, numbers = expand_groups(num_rows)
    if 0 <= num_batches * config.batch_size < len(numbers):
        chosen = spread_rows(len(numbers), num_batches * config.batch_size)
        source_of_row = source_of_row[chosen]
        numbers = numbers[chosen]
    order = np.argsort((numbers + 0.5) / num_rows[source_of_row], kind="stable")
    stop = -(-len(order) // config.batch_size)
    pad_width = (0, stop * config.batch_size - len(order))
    source_of_row = np.pad(source_of_row[order], pad_width, constant_values=-1)
    numbers = np.pad(numbers[order], pad_width)
    row_indices = _row_indices(config.batch_size, rows)

    def read(step: int) -> Batch:
        positions = step * config.batch_size + row_indices
        return read_rows(readers, source_of_row[positions], numbers[positions])

    num_tokens = len(row_indices) * config.sequence_length
    return _prefetch(read, range(stop), is_local, num_tokens, config)


def num_validation_batches(sources: Sources, config: DataConfig) -> int:
    """Return the number of batches of the whole validation text."""
    readers, _ = _open_split(sources, config, sources.held_out, pad=True)
    return -(-sum(map(len, readers.values())) // config.batch_size)


def spread_rows(num_rows: int, num_chosen: int) -> np.ndarray:
    """Choose rows that are spread evenly over all rows, always the same ones.

    Each of `num_chosen` stretches of nearly equal length gives one row. Its place in
    the stretch changes from one to the next by the golden ratio, so that documents of
    several kinds in regular turns are all represented. The result is ascending.
    """
    bounds = np.arange(num_chosen + 1) * num_rows // num_chosen
    places = np.arange(num_chosen) * _GOLDEN_RATIO % 1
    return bounds[:-1] + np.floor(places * np.diff(bounds)).astype(np.int64)


def _open_split(
    sources: Sources, config: DataConfig, split: Split, pad: bool = False
) -> tuple[dict[str, Rows], bool]:
    """Return a split's rows by source, and whether all are in memory or local files."""
    rows = {
        name: open_rows(store, config, split, sources.cache, pad)
        for name, store in sources.stores.items()
    }
    stores = sources.stores.values()
    return rows, all(store.split(split).is_local for store in stores)


def _row_indices(num_rows: int, rows: RowSlices) -> np.ndarray:
    rows = slice(None) if rows is None else rows
    slices = [rows] if isinstance(rows, slice) else rows
    return np.concatenate([np.arange(num_rows)[s] for s in slices])


def _prefetch(
    read: Callable[[int], Batch],
    steps: range,
    is_local: bool,
    num_tokens: int,
    config: DataConfig,
) -> Iterator[Batch]:
    import grain

    is_large = num_tokens >= _LARGE_BATCH_TOKENS
    num_threads = _THREADS_LARGE if is_large else _THREADS_SMALL
    num_threads = num_threads if is_local else _THREADS_REMOTE
    options = grain.ReadOptions(min(num_threads, config.prefetch), config.prefetch)
    batches = grain.MapDataset.range(steps.start, steps.stop).map(read)
    return iter(batches.to_iter_dataset(options))
