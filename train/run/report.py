"""Write the report of a run, `report.html`, a page that needs no network.

The template `report.html` in this package draws the metrics, the events and
`config.yaml` as far as they exist, so the page can be written at any time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from etils import epath

from train.cli.plain_yaml import parse_yaml
from train.errors import meaning
from train.page import write_page
from train.run.evaluations import read_scores
from train.run.goodput import BUCKETS, Goodput, StartAccount, finite_float, goodput_of
from train.run.heat_maps import heat_maps
from train.run.jsonl_reader import Row
from train.run.metrics import read_events
from train.run.starts import read_results
from train.run.thinned import Point, thin, thinned_metrics
from train.run.validations import Validation, Validations, read_validations
from train.units import format_bytes, format_count, format_seconds

Series = Mapping[str, Sequence[Point]]  # points by metric
TEMPLATE = Path(__file__).with_name("report.html")
_LOSSES = {
    "loss": "training",
    "loss_mean": "mean since the last line",
    "eval/loss": "validation",
    "eval_whole/loss": "whole validation set",
}
_CHARTS = (  # title, line names by metric, whether the axis starts at zero
    ("Loss", _LOSSES, False),
    ("Gradient norm", {"grad_norm": "gradient norm"}, True),
    ("Learning rate", {"learning_rate": "learning rate"}, True),
    ("Tokens per second", {"tokens_per_second": "tokens/s"}, True),
    ("Memory of the device", {"memory_bytes": "memory"}, True),
    ("Load of experts", {"expert_load": "most loaded over mean"}, False),
)
_UNITS = {  # the name of a chart's vertical axis, if it is not the chart's title
    **dict.fromkeys(("Loss", "Validation loss"), "nats a token"),
    "Loss of validation sets": "nats a token",
    "Memory of the device": "bytes",
}
# Metrics that a chart over steps would not help to understand.
_NOT_CHARTED = {
    *("step", "tokens", "positions", "flops", "step_seconds", "mfu"),
    *("targets", "skipped", "overflow"),
}
_SET_LOSS = re.compile("eval/([^/]+)/loss")
_TASK = re.compile(r"tasks/([^/]+)/((?!\w*_stderr).+)")  # name and metric
# Per-layer metrics, scores of validation sets except their loss, and metrics of tasks.
_SHOWN_ELSEWHERE = re.compile(r"/\d+$|^eval(_\w+)?/|^tasks/")


def write_report(run_dir: epath.Path | Path, live: bool = False) -> epath.Path:
    """Write `<run_dir>/report.html` atomically and return its path.

    If `live`, browsers reload the page, because it will be written again.
    """
    report = epath.Path(run_dir) / "report.html"
    write_page(report, TEMPLATE, report_data(run_dir) | {"live": live})
    return report


def report_data(run_dir: epath.Path | Path) -> dict[str, Any]:
    """Return the content of a report, as plain values.

    Missing or empty files, single points and null values cause gaps, not errors.
    """
    run_dir = epath.Path(run_dir)
    path = run_dir / "config.yaml"
    config = path.read_bytes().decode(errors="replace") if path.exists() else ""
    name, num_steps = _read_name_and_steps(config)
    metrics = thinned_metrics(run_dir)
    events = read_events(run_dir)
    goodput = goodput_of(events)
    series = series_of(metrics.rows)
    charts = [
        chart(series, title, lines, from_zero)
        for title, lines, from_zero in _chart_definitions(series)
    ]
    return {
        "name": name or run_dir.name,
        "figures": _figures(
            series, read_validations(run_dir), metrics.num_missing, goodput, num_steps
        ),
        "tables": _score_tables(run_dir, metrics.rows),
        "charts": [content for content in charts if content],
        "heat_maps": heat_maps(metrics.rows),
        "restarts": _restored_steps(events),
        "sample": _sample(run_dir),
        "goodput": _goodput_content(goodput),
        "config": config,
    }


def _sample(run_dir: epath.Path) -> dict[str, Any] | None:
    """Return the text that the finished run wrote and its step; None if there is none.

    Damaged results count as missing.
    """
    results = read_results(run_dir)
    text = results.get("sample")
    return {"step": results["step"], "text": text} if isinstance(text, str) else None


def _chart_definitions(series: Series) -> list[tuple[str, Mapping[str, str], bool]]:
    """Return _CHARTS, and charts for validation sets, tasks and all other metrics."""
    set_names = {key: match[1] for key in series if (match := _SET_LOSS.fullmatch(key))}
    tasks = defaultdict[str, dict[str, str]](dict)
    for match in filter(None, map(_TASK.fullmatch, series)):
        tasks[f"Tasks: {match[2]}"][match[0]] = match[1]
    charts = [*_CHARTS, ("Loss of validation sets", set_names, False)]
    charts += [(metric, lines, False) for metric, lines in tasks.items()]
    charted = _NOT_CHARTED.union(*(lines for _, lines, _ in charts))
    others = (k for k in series if k not in charted and not _SHOWN_ELSEWHERE.search(k))
    return charts + [(key, {key: key}, False) for key in others]


def _score_tables(run_dir: epath.Path, rows: Sequence[Row]) -> list[Any]:
    """Return a list with the table of scores; [] if there are no scores."""
    scores = [
        [*score[:3], f"{score.step:,}", score.options]
        for score in read_scores(run_dir, rows)
    ]
    return [("Scores", ["", "metric", "score", "step", ""], scores)] if scores else []


def _read_name_and_steps(text: str) -> tuple[str | None, int | None]:
    """Return `run.name` and `train.num_steps`, each None if missing."""
    try:
        config = parse_yaml(text)
        name = (config.get("run") or {}).get("name")
        steps = (config.get("train") or {}).get("num_steps")
    except (ValueError, AttributeError):
        return None, None
    return str(name) if name else None, steps if isinstance(steps, int) else None


def series_of(rows: Iterable[Row]) -> Series:
    """Return the points of each metric; a value that is not finite becomes None."""
    series = defaultdict[str, list[Point]](list)
    for row in rows:
        if (step := finite_float(row.get("step"))) is not None:
            for key, value in row.items():
                series[key].append((step, finite_float(value)))
    return series


def finite_points(series: Series, key: str) -> list[tuple[float, float]]:
    """Return the points of a metric that have a value."""
    return [(x, y) for x, y in series.get(key, ()) if y is not None]


def _restored_steps(events: Sequence[Row]) -> list[float]:
    """Return the steps that starts after the first restored; 0 is a fresh state."""
    restores = [e for e in events if e.get("event") == "restore"]
    restarts = [e for e in restores if e.get("start", 1) > 1]
    return [e["step"] for e in restarts if finite_float(e.get("step")) is not None]


def _figures(
    series: Series,
    validations: Validations,
    num_missing: Mapping[str, int],
    goodput: Goodput,
    num_steps: int | None,
) -> list[tuple[str, str, str]]:
    """Return the title, the value and a note for each number at the top of the page."""
    figures: list[tuple[str, str, str]] = []
    if steps := [x for x, _ in series.get("step", ())]:
        # A later start may have trained beyond the target of the first.
        target = f"of {num_steps:,}" if num_steps and max(steps) <= num_steps else ""
        figures.append(("Steps", f"{max(steps):,.0f}", target))
    if tokens := finite_points(series, "tokens"):
        figures.append(("Tokens", format_count(tokens[-1][1]), ""))
    if losses := finite_points(series, "loss"):
        num_nonfinite = num_missing.get("loss", 0)
        note = f"{num_nonfinite:,} not finite" if num_nonfinite else ""
        figures.append(("Final loss", f"{losses[-1][1]:.4f}", note))
    if validations.best:
        figures.append(("Best validation loss", *_value_and_note(validations.best)))
    if validations.whole:
        figures.append(("Loss of whole set", *_value_and_note(validations.whole)))
    if goodput.wall_s:
        starts = len(goodput.starts)
        num_repeated = goodput.num_wasted
        note = f"{starts} starts" if starts > 1 else ""
        figures.append(("Wall time", format_seconds(goodput.wall_s), note))
        note = f"{num_repeated:,} steps done again" if num_repeated else ""
        figures.append(("Goodput", f"{goodput.fraction:.1%}", note))
    if speeds := [y for _, y in finite_points(series, "tokens_per_second")]:
        figures.append(("Tokens per second", format_count(median(speeds)), "median"))
    if memory := finite_points(series, "memory_bytes"):
        peak = max(y for _, y in memory)
        figures.append(("Memory of the device", format_bytes(peak), "highest"))
    if mfus := [y for _, y in finite_points(series, "mfu")]:
        figures.append(("MFU", f"{median(mfus):.1%}", "median"))
    return figures


def _value_and_note(score: Validation) -> tuple[str, str]:
    bits = score.bits_per_byte
    note = "" if bits is None else f"{bits:.4f} bits per byte, "
    return f"{score.loss:.4f}", f"{note}at step {score.step:,}"


def chart(
    series: Series, title: str, lines: Mapping[str, str], from_zero: bool
) -> dict[str, Any] | None:
    """Return a chart with its range and lines; None if no value is finite.

    If there are at least 50 values, and the highest exceeds three times the 98th
    percentile, the axis ends at this limit, so that no spike flattens the curve. Then
    `cut` is the highest value; otherwise it is None.
    """
    points = [point for key in lines for point in finite_points(series, key)]
    if not points:
        return None
    values = sorted(y for _, y in points)
    low = 0.0 if from_zero else values[0]
    high = values[-1]
    limit = 3 * values[int(0.98 * (len(values) - 1))]
    is_cut = len(values) >= 50 and 0 < limit < high
    high = limit if is_cut else high
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    first_x = min(x for x, _ in points)
    last_x = max(x for x, _ in points)
    first_x = 0 if first_x < 0.1 * last_x or first_x == last_x else first_x
    return {
        "title": title,
        "unit": _UNITS.get(title, ""),
        "x": (first_x, max(last_x, first_x + 1)),
        "y": (low if from_zero else low - pad, high + pad),
        "cut": values[-1] if is_cut else None,
        "lines": [
            {"name": name, "points": thin(series.get(key, ()))}
            for key, name in lines.items()
        ],
    }


def _goodput_content(goodput: Goodput) -> dict[str, Any]:
    """Return the seconds of each bucket, for the run and for each start."""

    def bucket_rows(buckets: dict[str, float]) -> list[dict[str, Any]]:
        return [
            {"name": name, "title": BUCKETS[name], "seconds": seconds}
            | {"text": format_seconds(seconds)}
            for name, seconds in buckets.items()
            if seconds
        ]

    def note(start: StartAccount) -> str:
        steps = "no step"
        if start.last_step is not None:
            steps = f"step {start.first_step or 0:,} to {start.last_step:,}"
        return f"{steps}, {meaning(start.code)}"

    return {
        "wall_s": goodput.wall_s,
        "buckets": bucket_rows(goodput.buckets),
        "starts": [
            {"name": f"Start {start.number}", "note": note(start)}
            | {"buckets": bucket_rows({"idle": start.idle_s, **start.buckets})}
            for start in goodput.starts
        ],
    }
