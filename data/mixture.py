"""The order of a mixture: which source each row comes from, and which row of it.

A phase is a span of rows with constant weights. After any number of rows of a phase,
the number of rows from each source differs from the source's share by less than one
row. A difference at the end of a phase is not made up for in the next phase. A change
of weights does not change the order of earlier rows. The order depends on the names and
weights alone; it uses neither random numbers nor floats. Looking up row 10**9 takes as
long as row 0. A source of weight 0 contributes no rows.

Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): with
k sources, no source ever needs to differ from its share by more than 1 - 1/(2k-2) rows.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

MAX_PERIOD = 2**20  # an order must repeat after at most this number of rows


class Mixture:
    """The order in which rows are taken from several sources."""

    def __init__(
        self, names: Sequence[str], phases: Sequence[tuple[int, Mapping[str, float]]]
    ):
        """Compute one period of each phase's order, after which the order repeats.

        Args:
            names: the sources. Their order decides only the sources' indices.
            phases: (first row, weights) of each phase. The first phase begins at row 0
                and the last has no end. Weights are decimals and are taken exactly as
                written. They need not sum to 1; a source without a weight has 0.
                `DataConfig.mistakes` checks the weights and their number of digits.
        """
        self._phase_starts = np.array([first for first, _ in phases], np.int64)
        lengths = [*np.diff(self._phase_starts).tolist(), MAX_PERIOD]
        by_name = np.argsort(np.array(names), kind="stable")
        periods = []
        orders = []
        ranks = []
        period_rows = []
        for (_, weights), length in zip(phases, lengths, strict=True):
            shares = shares_of([weights.get(names[int(n)], 0) for n in by_name])
            period = math.lcm(*(share.denominator for share in shares))
            order = by_name[_source_sequence(shares, period, min(period, length))]
            one_hot = np.eye(len(names), dtype=np.int64)[order]
            earlier = np.cumsum(one_hot, axis=0) - one_hot
            periods.append(period)
            orders.append(order)
            ranks.append(earlier[range(len(order)), order])
            period_rows.append(one_hot.sum(axis=0))
        self._source_table = np.concatenate(orders)
        self._rank_table = np.concatenate(ranks)
        self._periods = np.array(periods, np.int64)
        # For each phase: the index of its first entry in the two tables above, each
        # source's number of rows in a period, and its number of rows before the phase.
        self._table_starts = np.cumsum([0, *map(len, orders[:-1])], dtype=np.int64)
        self._period_rows = np.array(period_rows)
        self._rows_before = np.zeros_like(self._period_rows)
        for phase, (length, _) in enumerate(itertools.pairwise(lengths)):
            self._rows_before[phase + 1] = self._counts_in_phase(phase, length)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up rows by number: int64 [n], in any order.

        Returns int64 [n], the source of each row as an index into `names`, and int64
        [n], the number of earlier rows from the same source.
        """
        phase = np.searchsorted(self._phase_starts, numbers, "right") - 1
        offset = numbers - self._phase_starts[phase]
        cycle, position = np.divmod(offset, self._periods[phase])
        entry = self._table_starts[phase] + position
        source = self._source_table[entry]
        earlier = cycle * self._period_rows[phase, source] + self._rank_table[entry]
        return source, self._rows_before[phase, source] + earlier

    def counts(self, num_rows: int) -> np.ndarray:
        """Count the rows of each source among the first `num_rows`: int64 [names]."""
        phase = int(np.searchsorted(self._phase_starts, num_rows, "right")) - 1
        return self._counts_in_phase(phase, num_rows - int(self._phase_starts[phase]))

    def _counts_in_phase(self, phase: int, num_rows: int) -> np.ndarray:
        """Count each source's rows before a phase and in its first `num_rows` rows."""
        cycles, remainder = divmod(num_rows, int(self._periods[phase]))
        entry = self._table_starts[phase]
        partial_cycle = np.bincount(
            self._source_table[entry : entry + remainder],
            minlength=self._period_rows.shape[1],
        )
        whole_cycles = cycles * self._period_rows[phase]
        return self._rows_before[phase] + whole_cycles + partial_cycle


def _source_sequence(shares: list[Fraction], period: int, num_rows: int) -> list[int]:
    """Return the source of each of the first `num_rows` rows of a phase.

    A source's deficit is its share of the rows so far minus the number of rows that it
    gave. The source may give the next row if its deficit is above 0, and should do so
    if the deficit is at least 1/(2k-2). Its deadline is the last row before the deficit
    exceeds 1 - 1/(2k-2). Among the sources that should give a row, or else among those
    that may, the one with the earliest deadline is chosen. By Tijdeman's theorem, no
    source misses its deadline. After a period, each source has given exactly its share,
    and the order repeats.
    """
    # Count in fractions of a row that make shares and margins integers.
    margins_per_row = max(1, 2 * len(shares) - 2)
    row_units = math.lcm(margins_per_row, period)
    margin = row_units // margins_per_row
    share_units = [int(share * row_units) for share in shares]
    counts = [0] * len(shares)

    def next_deadlines(source: int) -> tuple[int, int, int]:
        """Return the rows at which a source may, should and must give its next row."""
        given = counts[source] * row_units
        share = share_units[source]
        may = given + 1
        should = given + margin
        must = given + row_units - margin + 1
        return (may - 1) // share, (should - 1) // share, (must - 1) // share

    deadlines = {s: next_deadlines(s) for s, share in enumerate(share_units) if share}
    order = []
    for row in range(num_rows):
        eligible = [source for source, (may, _, _) in deadlines.items() if may <= row]
        source = min(eligible, key=lambda s: (deadlines[s][1] > row, deadlines[s][2]))
        order.append(source)
        counts[source] += 1
        deadlines[source] = next_deadlines(source)
    return order


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Return each source's exact share of the rows; one weight must be above 0."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def broken_period_rule(weights: Sequence[float]) -> str | None:
    """Return the broken rule if the period exceeds `MAX_PERIOD`, otherwise None."""
    period = math.lcm(*(share.denominator for share in shares_of(weights)))
    if period <= MAX_PERIOD:
        return None
    rule = f"repeat only after {period} rows, and the limit is {MAX_PERIOD}: "
    return f"{rule}round them to fewer digits"
