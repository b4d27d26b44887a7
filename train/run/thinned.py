"""Thin the metrics of a long run while reading them, so that any run fits in memory.

The curve of each metric is divided into stretches of equally many points. It keeps the
first, the lowest, the highest and the last point of each stretch. Once there are too
many stretches, neighbours are merged in pairs.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from etils import epath

from train.run.goodput import finite_float
from train.run.jsonl_reader import Row
from train.run.metrics import iterate_metrics

_MAX_ROWS = 20_000  # metrics with fewer lines are not thinned
_MAX_STRETCHES = 2_000
_MAX_POINTS = 1_000  # points of a drawn curve
_LAYER_PREFIX = "numerics/"

Item = TypeVar("Item")
Point = tuple[float, float | None]  # step and value, which is None if not finite


class ThinnedMetrics(NamedTuple):
    """The metrics of a run, thinned if there are too many lines.

    rows: the lines, ascending by step; if thinned, the per-layer lines come last.
    num_missing: how many values of each metric were not finite, over all lines.
    """

    rows: list[Row]
    num_missing: Mapping[str, int]


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most a thousand points: both ends and both extremes of each stretch."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    curve = _Stretches[Point](_extremes, _MAX_POINTS // 4)
    curve.extend(points)
    return curve.items()


def thinned_metrics(run_dir: epath.Path | Path) -> ThinnedMetrics:
    """Return the metrics of a run, thinned if there are 20,000 lines or more.

    After thinning, the line of a step has only the metrics whose curves keep a point at
    this step. The per-layer metrics of a stretch become one line with their largest
    values.
    """
    lines = iterate_metrics(run_dir)
    rows = list(itertools.islice(lines, _MAX_ROWS))
    if len(rows) < _MAX_ROWS:
        names = (key for row in rows for key in row if finite_float(row[key]) is None)
        return ThinnedMetrics(rows, Counter(names))
    num_missing = Counter[str]()
    curves = defaultdict[str, _Stretches[Point]](lambda: _Stretches(_extremes))
    layer_rows = _Stretches[Row](_merge_largest)
    while rows:
        points_by_metric = defaultdict[str, list[Point]](list)
        layer_lines = list[Row]()
        for row in rows:
            # A line holds either only per-layer metrics or none, so its last key shows
            # which (the first is the step).
            if next(reversed(row)).startswith(_LAYER_PREFIX):
                layer_lines.append(row)
                continue
            for key in row.keys() - {"step"}:
                points_by_metric[key].append((row["step"], finite_float(row[key])))
        layer_rows.extend(layer_lines)
        for key, points in points_by_metric.items():
            num_missing[key] += sum(value is None for _, value in points)
            curves[key].extend(points)
        rows = list(itertools.islice(lines, _MAX_ROWS))
    merged = defaultdict[float, Row](dict)
    for key, curve in curves.items():
        for step, value in curve.items():
            merged[step][key] = value
    thinned = [{"step": step, **values} for step, values in sorted(merged.items())]
    return ThinnedMetrics([*thinned, *layer_rows.items()], num_missing)


class _Stretches(Generic[Item]):
    """Items in stretches of equal length, each reduced to a few items by `reduce`."""

    def __init__(
        self,
        reduce: Callable[[list[Item]], list[Item]],
        max_stretches: int | None = None,
    ):
        self._reduce = reduce
        self._length = 1
        self._max_stretches = max_stretches or _MAX_STRETCHES
        self._reduced: list[list[Item]] = []
        self._unreduced: list[Item] = []

    def extend(self, items: Sequence[Item]) -> None:
        self._unreduced += items
        num_consumed = 0
        while len(self._unreduced) - num_consumed >= self._length:
            stretch = self._unreduced[num_consumed : num_consumed + self._length]
            num_consumed += self._length
            self._reduced.append(self._reduce(stretch))
            if len(self._reduced) == self._max_stretches:
                pairs = zip(self._reduced[::2], self._reduced[1::2], strict=True)
                self._reduced = [self._reduce([*left, *right]) for left, right in pairs]
                self._length *= 2
        del self._unreduced[:num_consumed]

    def items(self) -> list[Item]:
        """Return the items of all reduced stretches, including the incomplete last."""
        newest = self._reduce(self._unreduced) if self._unreduced else []
        return [item for stretch in [*self._reduced, newest] for item in stretch]


def _extremes(points: list[Point]) -> list[Point]:
    """Return the first, the lowest, the highest and the last point, in order."""
    if len(points) <= 2:
        return points
    values = [value for _, value in points]
    finite_values = [value for value in values if value is not None]
    extremes = (min(finite_values), max(finite_values)) if finite_values else ()
    indices = {0, len(points) - 1, *map(values.index, extremes)}
    return [points[index] for index in sorted(indices)]


def _merge_largest(rows: list[Row]) -> list[Row]:
    """Return one line with each metric's largest value, None if a row lacks a value."""
    if len(rows) == 1:
        return rows
    merged = Row(rows[-1])
    for key in merged:
        values = [v for row in rows if (v := finite_float(row.get(key))) is not None]
        merged[key] = max(values) if len(values) == len(rows) else None
    return [merged | {"step": rows[-1]["step"]}]
