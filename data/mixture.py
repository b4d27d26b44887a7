"""The order of a mixture: which source each row comes from, and which row of it.

A phase is a span of rows with constant weights. After any number of rows of a phase,
the number of rows from each source differs from its share by less than one row. A
difference at the end of a phase is not made up for in the next one, so that a change of
weights moves no earlier row. The order is a function of the weights alone, without
random numbers or floats, and looking up row 10**9 takes as long as row 0. A source of
weight 0 gives no row.

Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): with
k sources, no source ever needs to differ from its share by more than 1 - 1/(2k-2) rows.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

MAX_PERIOD = 2**20


class Mixture:
    """The order in which rows are taken from several sources."""

    def __init__(
        self, names: Sequence[str], phases: Sequence[tuple[int, Mapping[str, float]]]
    ):
        """Compute one period of the order of each phase.

        Args:
            names: the sources. Their order only gives them numbers.
            phases: (first row, weights) of each phase. The first phase begins at row 0
                and the last has no end. Weights are decimals and are taken exactly as
                written. They need not sum to 1, and a missing one is 0.
                `DataConfig.mistakes` checks them, also for too many digits.
        """
        self._first_row = np.array([first for first, _ in phases], np.int64)
        lengths = [*np.diff(self._first_row).tolist(), MAX_PERIOD]
        by_name = np.argsort(np.array(names), kind="stable")
        periods, orders, ranks, gains = [], [], [], []
        for (_, weights), length in zip(phases, lengths, strict=True):
            shares = shares_of([weights.get(names[int(n)], 0) for n in by_name])
            period = math.lcm(*(share.denominator for share in shares))
            order = by_name[_first_rows(shares, period, min(period, length))]
            one_hot = np.eye(len(names), dtype=np.int64)[order]
            earlier = np.cumsum(one_hot, axis=0) - one_hot
            periods.append(period)
            orders.append(order)
            ranks.append(earlier[range(len(order)), order])
            gains.append(one_hot.sum(axis=0))
        self._source, self._rank = np.concatenate(orders), np.concatenate(ranks)
        self._period = np.array(periods, np.int64)
        # Each phase has the start of its period in the tables, the number of rows of
        # each source in a period, and the number of rows of each before the phase.
        self._entry = np.cumsum([0, *map(len, orders[:-1])], dtype=np.int64)
        self._gain = np.array(gains)
        self._before = np.zeros_like(self._gain)
        for phase, (length, _) in enumerate(itertools.pairwise(lengths)):
            self._before[phase + 1] = self._counts(phase, length)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up rows by number: int64 [n], in any order.

        Returns int64 [n], the source of each row as an index into `names`, and int64
        [n], the number of earlier rows from the same source.
        """
        phase = np.searchsorted(self._first_row, numbers, "right") - 1
        offset = numbers - self._first_row[phase]
        cycle, position = np.divmod(offset, self._period[phase])
        entry = self._entry[phase] + position
        source = self._source[entry]
        first = self._before[phase, source] + cycle * self._gain[phase, source]
        return source, first + self._rank[entry]

    def counts(self, num_rows: int) -> np.ndarray:
        """Count the rows from each source among the first rows: int64 [names]."""
        phase = int(np.searchsorted(self._first_row, num_rows, "right")) - 1
        return self._counts(phase, num_rows - int(self._first_row[phase]))

    def _counts(self, phase: int, num_rows: int) -> np.ndarray:
        """Count the rows from each source before row `num_rows` of a phase."""
        cycles, remainder = divmod(num_rows, int(self._period[phase]))
        entry = self._entry[phase]
        partial_cycle = np.bincount(
            self._source[entry : entry + remainder], minlength=self._gain.shape[1]
        )
        return self._before[phase] + cycles * self._gain[phase] + partial_cycle


def _first_rows(shares: list[Fraction], period: int, num_rows: int) -> list[int]:
    """Return the source of each of a phase's first rows.

    A source is due by its share of the rows so far, less the rows that it gave. It may
    give the next row if it is due more than 0, it should if it is due at least
    1/(2k-2), and it must before it is due more than 1 - 1/(2k-2). Among the sources
    that should, the one that must first is chosen. By the theorem, none is then late.
    After a period each source has given exactly its share, and the order repeats.
    """
    # Count in units that make shares and bounds whole numbers.
    margins = max(1, 2 * len(shares) - 2)
    one = math.lcm(margins, period)
    margin = one // margins
    units = [int(share * one) for share in shares]
    counts = [0] * len(shares)

    def window(source: int) -> tuple[int, int, int]:
        """Return the rows from which a source may, should and must give its next."""
        total, unit = counts[source] * one, units[source]
        may, should, must = total + 1, total + margin, total + one - margin + 1
        return (may - 1) // unit, (should - 1) // unit, (must - 1) // unit

    windows = {source: window(source) for source, unit in enumerate(units) if unit}
    order = []
    for row in range(num_rows):
        eligible = [source for source, (may, _, _) in windows.items() if may <= row]
        source = min(eligible, key=lambda s: (windows[s][1] > row, windows[s][2]))
        order.append(source)
        counts[source] += 1
        windows[source] = window(source)
    return order


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Return each source's exact share of a row. At least one weight is above 0."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def too_many_digits(weights: Sequence[float]) -> str | None:
    """Return the mistake if the order of these weights repeats too late, or None."""
    period = math.lcm(*(share.denominator for share in shares_of(weights)))
    rule = (
        f"repeat only after {period} rows, and the limit is {MAX_PERIOD}: round them "
    )
    return f"{rule}to fewer digits" if period > MAX_PERIOD else None
