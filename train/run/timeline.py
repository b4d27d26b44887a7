"""Where the time of a run went, as HTML: one bar of all, a table, a bar a start."""

from collections.abc import Mapping

from train.errors import meaning
from train.run.goodput import BUCKETS, Goodput, Start
from train.units import format_seconds


def timeline(goodput: Goodput) -> str:
    """Return the section, empty if there is nothing to show."""
    if not goodput.wall_s:
        return ""
    buckets, rows = goodput.buckets, []
    for name, seconds in sorted(buckets.items(), key=lambda item: -item[1]):
        rows.append(
            f'<tr><td><i style="background:var(--{name})"></i>{BUCKETS[name]}</td>'
            f"<td>{format_seconds(seconds)}</td>"
            f"<td>{seconds / goodput.wall_s:.1%}</td></tr>"
        )
    return (
        f"<section><h2>Where the time went</h2>{_bar(buckets, goodput.wall_s)}"
        "<table><tr><th></th><th>Total</th><th>Share</th></tr>"
        f"{''.join(rows)}</table>{_starts(goodput)}</section>"
    )


def _starts(goodput: Goodput) -> str:
    """Return a bar for each start, at its place in the wall time of all."""
    if len(goodput.starts) < 2:
        return ""
    rows, before_s = [], 0.0
    for start in goodput.starts:
        rows.append(f"<span>{_label(start)}</span>")
        idle = {"idle": start.idle_s} if start.idle_s else {}
        rows.append(_bar({**idle, **start.buckets}, goodput.wall_s, before_s))
        before_s += start.idle_s + start.seconds
    return f'<div class="starts">{"".join(rows)}</div>'


def _label(start: Start) -> str:
    steps = "no step"
    if start.last_step is not None:
        steps = f"step {start.first_step or 0:,} to {start.last_step:,}"
    return f"Start {start.number}<small>{steps}, {meaning(start.code)}</small>"


def _bar(buckets: Mapping[str, float], wall_s: float, before_s: float = 0.0) -> str:
    """Return a bar that begins after `before_s` of the wall time."""
    after_s = max(0.0, wall_s - before_s - sum(buckets.values()))
    parts = [
        f'<i style="flex-grow:{seconds / wall_s:.6f};background:var(--{name})" '
        f'title="{BUCKETS[name]}: {format_seconds(seconds)}"></i>'
        for name, seconds in buckets.items()
    ]
    gaps = [f'<i style="flex-grow:{s / wall_s:.6f}"></i>' for s in (before_s, after_s)]
    if before_s or after_s > 1e-6 * wall_s:
        parts = [gaps[0], *parts, gaps[1]]
    return f'<div class="bar">{"".join(parts)}</div>'
