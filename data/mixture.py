"""Which source gives each row of a mixture, and which of that source's rows it is.

In every stretch of constant weights, after any number of its rows, each source has
given its share of them to within less than one row. Each stretch starts even: what a
source gave too much or too little by the end of one, less than a row, is not made up
for in the next, so that a change of the weights moves no row before it. The order is a
function of the weights alone: no random numbers, no floats, and row 10**9 costs what
row 0 does. A source of weight 0 gives no row.

Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980):
of k sources, none need ever be more than 1 - 1/(2k-2) rows from its share.
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
        self, names: Sequence[str], stretches: Sequence[tuple[int, Mapping[str, float]]]
    ):
        """Compute the order, one period of each stretch.

        Args:
            names: the sources. Their sequence numbers them and decides nothing else.
            stretches: (first row, weights) of each stretch of constant weights; the
                first is from row 0 on, the last has no end. Weights are decimals,
                taken exactly as they are written; they need not sum to 1, and an
                absent one is 0. `DataConfig.mistakes` says what they must be.

        Raises:
            ValueError: a weight needs too many digits.
        """
        self._first_row = np.array([first for first, _ in stretches], np.int64)
        lengths = [*np.diff(self._first_row).tolist(), MAX_PERIOD]
        by_name = np.argsort(np.array(names), kind="stable")
        periods, orders, ranks, gains = [], [], [], []
        for (_, weights), length in zip(stretches, lengths, strict=True):
            ordered = [weights.get(names[int(source)], 0) for source in by_name]
            if rule := too_many_digits(ordered):
                raise ValueError(f"the weights {dict(weights)} {rule}")
            shares = shares_of(ordered)
            period = math.lcm(*(share.denominator for share in shares))
            order = by_name[_first_rows(shares, period, min(period, length))]
            given = np.eye(len(names), dtype=np.int64)[order]
            periods.append(period)
            orders.append(order)
            ranks.append((np.cumsum(given, axis=0) - given)[range(len(order)), order])
            gains.append(given.sum(axis=0))
        self._source, self._rank = np.concatenate(orders), np.concatenate(ranks)
        self._period = np.array(periods, np.int64)
        # Per stretch: where its period stands in the tables, how many rows each source
        # gives in one, and how many each gave before the stretch.
        self._entry = np.cumsum([0, *map(len, orders[:-1])], dtype=np.int64)
        self._gain = np.array(gains)
        self._before = np.zeros_like(self._gain)
        for stretch, (length, _) in enumerate(itertools.pairwise(lengths)):
            self._before[stretch + 1] = self._counts(stretch, length)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up rows by number: int64 [n], in any order.

        Returns:
            int64 [n], which source gives the row, an index into `names`.
            int64 [n], how many rows that source gave before it.
        """
        stretch = np.searchsorted(self._first_row, numbers, "right") - 1
        offset = numbers - self._first_row[stretch]
        cycle, position = np.divmod(offset, self._period[stretch])
        entry = self._entry[stretch] + position
        source = self._source[entry]
        before = self._before[stretch, source] + cycle * self._gain[stretch, source]
        return source, before + self._rank[entry]

    def counts(self, num_rows: int) -> np.ndarray:
        """Count what each source gives of the first num_rows rows: int64 [names]."""
        stretch = int(np.searchsorted(self._first_row, num_rows, "right")) - 1
        return self._counts(stretch, num_rows - int(self._first_row[stretch]))

    def _counts(self, stretch: int, num_rows: int) -> np.ndarray:
        """Count the rows of each source up to so many rows into a stretch."""
        cycles, rest = divmod(num_rows, int(self._period[stretch]))
        entry = self._entry[stretch]
        given = np.bincount(
            self._source[entry : entry + rest], minlength=self._gain.shape[1]
        )
        return self._before[stretch] + cycles * self._gain[stretch] + given


def _first_rows(shares: list[Fraction], period: int, num_rows: int) -> list[int]:
    """Compute which source gives each of a stretch's first rows.

    A source may give its next row once it is due more than 0 of a row, should do so
    from 1/(2k-2) on, and must do so before it is due more than 1 - 1/(2k-2). Of those
    that should, the one that must first is first: then none is late, says the theorem.
    After a period all have given exactly their shares, and the order repeats.
    """
    # Counted in units that make shares and bounds whole numbers.
    margins = max(1, 2 * len(shares) - 2)
    one = math.lcm(margins, period)
    margin = one // margins
    units = [int(share * one) for share in shares]
    counts = [0] * len(shares)

    def window(source: int) -> tuple[int, int, int]:
        """Return the rows from which a source may, should and must give its next."""
        given, unit = counts[source] * one, units[source]
        may, should, must = given + 1, given + margin, given + one - margin + 1
        return (may - 1) // unit, (should - 1) // unit, (must - 1) // unit

    windows = {source: window(source) for source, unit in enumerate(units) if unit}
    order = []
    for row in range(num_rows):
        able = [source for source, (may, _, _) in windows.items() if may <= row]
        source = min(able, key=lambda s: (windows[s][1] > row, windows[s][2]))
        order.append(source)
        counts[source] += 1
        windows[source] = window(source)
    return order


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Return each source's share of a row, exactly; not all weights are 0."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def too_many_digits(weights: Sequence[float]) -> str | None:
    """Say what is wrong with weights whose order is too long to be tabled."""
    period = math.lcm(*(share.denominator for share in shares_of(weights)))
    if period <= MAX_PERIOD:
        return None
    return (
        f"repeat only after {period} rows, but at most {MAX_PERIOD} can be tabled: "
        f"round them to fewer digits"
    )
