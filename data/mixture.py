"""Which source gives each row of a mixture, and which of that source's rows it is.

After any number of rows each source has given its share, the sum of the weights in
force at those rows, to within less than one row; changes of the weights are no
exception, for what is owed is carried over them. The order is a function of the
weights alone: no random numbers, no floats, and row 10**9 costs what row 0 does.

A source of weight 0 gives no row, except one that it is still owed from before: when
its weight returns later, or when several sources were dropped at once and are owed a
row between them that nobody else can give without running a whole row ahead.

Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980):
of k sources, none need ever be more than 1 - 1/(2k-2) rows from its share.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MAX_PERIOD = 2**20
_NEVER = 2**62
_Stretches = Sequence[tuple[int, Mapping[str, float]]]


class Mixture:
    """The order in which rows are taken from several sources."""

    def __init__(self, names: Sequence[str], stretches: _Stretches):
        """Work out the order for good.

        Args:
            names: the sources. Their sequence numbers them and decides nothing else.
            stretches: (first row, weights) of each stretch of constant weights, the
                last of which has no end. Weights are decimals, taken exactly as they
                are written; they need not sum to 1, and an absent one is 0.

        Raises:
            ValueError: a weight is negative, of an unknown source or needs too many
                digits; all of a stretch are 0; first rows do not increase from 0.
        """
        _check(names, stretches)
        order = _Order(names, stretches)
        self._num_sources = len(names)
        self._source = np.array(order.source, np.int64)
        self._rank = np.array(order.rank, np.int64)
        segments = order.segments
        self._first_row = np.array([s.first_row for s in segments], np.int64)
        self._entry = np.array([s.entry for s in segments], np.int64)
        self._period = np.array([s.period for s in segments], np.int64)
        self._counts = np.array([s.counts for s in segments], np.int64)
        self._gain = np.array([s.gain for s in segments], np.int64)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up rows by number: int64 [n], in any order.

        Returns:
            int64 [n], which source gives the row, an index into `names`.
            int64 [n], how many rows that source gave before it.
        """
        segment, cycle, entry = self._find(numbers)
        source = self._source[entry]
        return source, self._rank[entry] + cycle * self._gain[segment, source]

    def counts(self, num_rows: int) -> np.ndarray:
        """Count what each source gives of the first num_rows rows: int64 [names]."""
        segment, cycle, entry = self._find(np.int64(num_rows))
        part = self._source[self._entry[segment] : entry]
        given = np.bincount(part, minlength=self._num_sources)
        return self._counts[segment] + cycle * self._gain[segment] + given

    def _find(self, numbers: np.ndarray | np.int64):
        """Give the segment, the cycle in it and the table's entry for each row."""
        segment = np.searchsorted(self._first_row, numbers, "right") - 1
        offset = numbers - self._first_row[segment]
        cycle, position = np.divmod(offset, self._period[segment])
        return segment, cycle, self._entry[segment] + position


class _Segment(NamedTuple):
    """Rows from first_row on that repeat the simulated rows [entry, entry + period)."""

    first_row: int
    entry: int
    period: int  # _NEVER where nothing repeats
    counts: list[int]  # rows of each source before the segment
    gain: list[int]  # rows of each source in one period


class _Order:
    """The rows simulated so far, and the segments of rows for which they stand.

    A source may give its next row once it is due more than 0 of a row, should do so
    from 1/(2k-2) on, and must do so before it is due more than 1 - 1/(2k-2). Of those
    that should, the one that must first is first: then none is late, says the theorem,
    of deadlines by the weights that lie ahead, and not by the present ones alone.
    """

    def __init__(self, names: Sequence[str], stretches: _Stretches):
        num_sources = len(names)
        exact = [_normalised(names, weights) for _, weights in stretches]
        self._periods = [math.lcm(*(w.denominator for w in row)) for row in exact]
        # Shares are counted in units that make weights and bounds whole numbers.
        margins = max(1, 2 * num_sources - 2)
        self._one = math.lcm(margins, *self._periods)
        self._margin = self._one // margins
        self._weights = [[int(weight * self._one) for weight in row] for row in exact]
        self._starts = [first for first, _ in stretches]
        self._ends = [*self._starts[1:], _NEVER]
        self._shares = [[0] * num_sources]  # of each source, before each stretch
        for stretch, (start, end) in enumerate(pairwise(self._starts)):
            pairs = zip(self._shares[-1], self._weights[stretch], strict=True)
            self._shares.append([share + (end - start) * w for share, w in pairs])
        self._by_name = sorted(range(num_sources), key=names.__getitem__)
        self._counts = [0] * num_sources
        self.source: list[int] = []
        self.rank: list[int] = []
        self.segments: list[_Segment] = []
        for stretch in range(len(stretches)):
            self._simulate(stretch)

    def _simulate(self, stretch: int) -> None:
        """Add a stretch: the way into a cycle, the cycle, the way out of it."""
        row, end = self._starts[stretch], self._ends[stretch]
        period = self._periods[stretch]
        # Up to here all deadlines that matter lie within the stretch, so that the order
        # follows from what is owed alone. That is the same after a period, but for
        # whole rows; as these are few, it soon is the same altogether.
        steady_until = end - period - 1
        seen: dict[tuple[int, ...], _Segment] = {}
        self.segments.append(self._here(row))
        while row < end:
            here = self._here(row)
            same = seen.setdefault(self._owed(row, stretch), here)
            cycle = row - same.first_row
            if cycle and cycle <= steady_until - row:
                gain = [b - a for a, b in zip(same.counts, here.counts, strict=True)]
                self.segments.append(same._replace(period=cycle, gain=gain))
                if end == _NEVER:
                    return
                times = (steady_until - row) // cycle
                row += times * cycle
                for source, more in enumerate(gain):
                    self._counts[source] += times * more
                self.segments.append(self._here(row))
            stop = min(row + period, end)
            self._give(range(row, stop), stretch)
            row = stop

    def _here(self, row: int) -> _Segment:
        counts = self._counts
        return _Segment(row, len(self.source), _NEVER, [*counts], [0] * len(counts))

    def _owed(self, row: int, stretch: int) -> tuple[int, ...]:
        passed = row - self._starts[stretch]
        state = self._shares[stretch], self._weights[stretch], self._counts
        return tuple(
            share + passed * weight - count * self._one
            for share, weight, count in zip(*state, strict=True)
        )

    def _give(self, rows: range, stretch: int) -> None:
        weights = self._weights[stretch]
        windows = [self._window(source, stretch) for source in range(len(weights))]

        def urgency(source: int) -> tuple[bool, bool, int]:
            _, should, must = windows[source]
            # A source dropped for good waits while another can run ahead in its place:
            # that gives a row early, which makes none late.
            dropped = must == _NEVER and not weights[source]
            return dropped, should > row, must

        for row in rows:
            able = [source for source in self._by_name if windows[source][0] <= row]
            source = min(able, key=urgency)
            self.source.append(source)
            self.rank.append(self._counts[source])
            self._counts[source] += 1
            windows[source] = self._window(source, stretch)

    def _window(self, source: int, stretch: int) -> tuple[int, int, int]:
        """Give the rows from which a source may, should and must give its next row."""
        given = self._counts[source] * self._one
        must = given + self._one - self._margin + 1
        levels = given + 1, given + self._margin, must
        first, second, third = (self._reached(source, x, stretch) for x in levels)
        return first, second, third

    def _reached(self, source: int, level: int, stretch: int) -> int:
        """Find the row whose weight lifts the share to a level.

        It lies in this stretch or a later one, or is the row before this stretch where
        the share is there already.
        """
        for at in range(stretch, len(self._starts)):
            missing = level - self._shares[at][source]
            if missing <= 0:
                return self._starts[at] - 1
            weight = self._weights[at][source]
            row = self._starts[at] - 1 - (-missing // weight) if weight else _NEVER
            if row < self._ends[at]:
                return row
        return _NEVER


def _check(names: Sequence[str], stretches: _Stretches) -> None:
    starts = [first for first, _ in stretches]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(
            f"the stretches of a mixture start at rows {starts}, but must start at row "
            "0 and then increase: sort them, and give each row once"
        )
    for first, weights in stretches:
        place = f"the weights {dict(weights)} from row {first} on"
        unknown = sorted(set(weights) - set(names))
        if unknown:
            raise ValueError(f"{place} name {unknown}, but sources are {list(names)}")
        if not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(f"{place} must be at least 0 and finite")
        if not any(weights.values()):
            raise ValueError(f"{place} need one above 0: some source must give a row")


def _normalised(names: Sequence[str], weights: Mapping[str, float]) -> list[Fraction]:
    """Give each source's part of a row, exactly."""
    written = [Fraction(str(weights.get(name, 0))) for name in names]
    exact = [weight / sum(written) for weight in written]
    period = math.lcm(*(weight.denominator for weight in exact))
    if period > MAX_PERIOD:
        raise ValueError(
            f"the weights {dict(weights)} repeat only after {period} rows, but at most "
            f"{MAX_PERIOD} can be tabled: round them to fewer digits"
        )
    return exact
