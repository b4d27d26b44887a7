"""A chart of metrics by step, as HTML and SVG that need no network.

About a thousand points a line, the extremes of every stretch kept; labels are HTML, so
that they keep their size when the page is narrow.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from train.units import format_count

Point = tuple[float, float | None]
Series = dict[str, list[Point]]  # by metric: its value, None if not finite, by step
_MAX_POINTS = 1000


def finite(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Leave out the points without a value."""
    return [(x, y) for x, y in points if y is not None]


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and the highest of each of about 500 stretches, in order."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    kept: list[Point] = [points[0]]
    size = 2 * len(points) / _MAX_POINTS
    for i in range(_MAX_POINTS // 2):
        stretch = points[int(i * size) : int((i + 1) * size)]
        known = [(y, j, x) for j, (x, y) in enumerate(stretch) if y is not None]
        if not known:
            kept.append((stretch[0][0], None))
            continue
        ends = sorted({min(known), max(known)}, key=lambda point: point[1])
        kept.extend((x, y) for y, _, x in ends)
    return [*kept, points[-1]]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers within [low, high], about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _label(value: float) -> str:
    if 0 < abs(value) < 0.001:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return format_count(float(f"{value:.6g}"))


def _labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    labels = [_label(tick) for tick in ticks]
    if len(set(labels)) < len(labels):  # a narrow range far from zero
        labels = [f"{tick:,.7g}" for tick in ticks]
    return list(zip(ticks, labels, strict=True))


def _y_range(values: Sequence[float], from_zero: bool) -> tuple[float, float, bool]:
    """Return the axis's range, and whether rare spikes lie beyond it.

    A spike a hundred times the rest would flatten all else: the axis ends at
    three times the 98th percentile when something lies above that.
    """
    ordered = sorted(values)
    low, high = (0.0 if from_zero else ordered[0]), ordered[-1]
    limit = 3 * ordered[int(0.98 * (len(ordered) - 1))]
    cut = len(ordered) >= 50 and 0 < limit < high
    high = limit if cut else high
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if from_zero else low - pad), high + pad, cut


def chart(
    series: Series,
    restarts: Sequence[float],
    title: str,
    lines: Sequence[tuple[str, str]],
    from_zero: bool,
) -> str:
    """Return one chart as a <figure>, empty if no line has a finite value.

    The SVG is stretched to its box (100 by 100 units); labels lie over it as HTML.
    """
    drawn = [point for key, _ in lines for point in finite(series[key])]
    if not drawn:
        return ""
    values = [y for _, y in drawn]
    left, right = min(x for x, _ in drawn), max(x for x, _ in drawn)
    left = 0 if left < 0.1 * right or left == right else left
    right = max(right, left + 1)
    bottom, top, cut = _y_range(values, from_zero)

    def at(x: float, y: float) -> tuple[float, float]:
        height = min(1.0, max(0.0, (y - bottom) / (top - bottom)))
        return 100 * (x - left) / (right - left), 100 - 100 * height

    marks, labels, keys, data = [], [], [], []
    for tick, label in _labelled(ticks(bottom, top, 4)):
        y = at(left, tick)[1]
        marks.append(f'<path class="grid" d="M0 {y:.2f}H100"/>')
        labels.append(f'<span class="y" style="top:{y:.2f}%">{label}</span>')
    for tick, label in _labelled([t for t in ticks(left, right, 4) if t % 1 == 0]):
        x = at(tick, bottom)[0]
        labels.append(f'<span class="x" style="left:{x:.2f}%">{label}</span>')
    for step in restarts:
        if left <= step <= right:
            marks.append(f'<path class="restart" d="M{at(step, 0)[0]:.2f} 0V100"/>')
    for i, (key, name) in enumerate(lines):
        points = thin(series[key])
        if known := finite(points):
            marks.append(_line(points, at, i))
            keys.append(f'<span class="key k{i}">{escape(name)}</span>')
            data.append({"name": name, "points": known})
    note = f"<small>spikes cut, up to {_label(max(values))}</small>" if cut else ""
    legend = "".join(keys) if len(keys) > 1 else ""
    extent = json.dumps({"left": left, "right": right, "lines": data})
    return (
        f"<figure><figcaption>{escape(title)}{note}{legend}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(title)} by step">{"".join(marks)}</svg>'
        f'{"".join(labels)}<i class="cursor"></i><output></output></div>'
        f'<script type="application/json">{extent}</script></figure>'
    )


def _line(points: Sequence[Point], at: Any, number: int) -> str:
    """Return a line as SVG, broken at nulls; few or lone points become dots."""
    path, dots, pen_down = [], [], False
    for i, (x, y) in enumerate(points):
        if y is None:
            pen_down = False
            continue
        where = "{:.2f} {:.2f}".format(*at(x, y))
        path.append(f"{'L' if pen_down else 'M'}{where}")
        ends = i + 1 == len(points) or points[i + 1][1] is None
        if len(points) <= 40 or (ends and not pen_down):
            dots.append(f"M{where}h0")
        pen_down = True
    line = f'<path class="line s{number}" d="{"".join(path)}"/>'
    return line + f'<path class="dots s{number}" d="{"".join(dots)}"/>'
