"""Compare several runs: last and best figures, curves, and differences of configs."""

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from train.identity import flatten
from train.run.evaluations import Scored, read_scores
from train.run.goodput import finite
from train.run.report import Point, Row, chart, finite_points, series_of
from train.run.starts import read_run
from train.run.thinned import thinned_metrics
from train.units import format_count

_CHARTS = (  # title, metric, whether the axis starts at zero
    ("Loss", "loss", False),
    ("Validation loss", "eval/loss", False),
    ("Bits per byte", "eval/bits_per_byte", False),
    ("Gradient norm", "grad_norm", True),
    ("Learning rate", "learning_rate", True),
    ("Tokens per second", "tokens_per_second", True),
)
_AXES = {"step": None, "tokens": "tokens", "FLOPs": "flops"}  # axis: its metric
_FIGURES = (
    *("", "Steps", "Tokens", "Last loss", "Last validation loss"),
    *("Best validation loss", "At step", "Bits per byte there"),
)
_IGNORED = ("run.", "tracker.", "runtime.compilation_cache", "data.cache_dir")


def compare_runs(folders: Sequence[epath.Path]) -> dict[str, Any]:
    """Return the content of a page that compares runs, as plain values.

    Args:
        folders: the folders of the runs, each with a config.yaml.

    Returns:
        Tables as (title, headers, rows), and charts by their axis. A run without logged
        FLOPs is missing from the charts over FLOPs.
    """
    names = [folder.name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    rows = dict(
        zip(names, (thinned_metrics(folder).rows for folder in folders), strict=True)
    )
    configs = [flatten(read_run(str(folder))) for folder in folders]
    figures = [[name, *_figures(of_run)] for name, of_run in rows.items()]
    marks = _marks(
        [
            read_scores(folder, of_run)
            for folder, of_run in zip(folders, rows.values(), strict=True)
        ]
    )
    return {
        "name": ", ".join(names),
        "tables": [
            ("Runs", [*_FIGURES], figures),
            *([("Newest score of each run", ["", *names], marks)] if marks else []),
            ("Config", ["", *names], _differences(configs)),
        ],
        "axes": {axis: _charts(rows, metric) for axis, metric in _AXES.items()},
        "restarts": [],
    }


def _figures(rows: Sequence[Row]) -> list[str]:
    """Return the cells of a run under the headers of _FIGURES."""
    last = {key: finite(value) for row in rows for key, value in row.items()}
    scored = finite_points(series_of(rows, "eval/loss"))
    step, best = min(scored, key=lambda point: point[1], default=(None, None))
    bits = dict(series_of(rows, "eval/bits_per_byte"))
    return [
        f"{last.get('step') or 0:,.0f}",
        format_count(last.get("tokens") or 0),
        *map(_shown, (last.get("loss"), last.get("eval/loss"), best)),
        *(("-", "-") if step is None else (f"{step:,.0f}", _shown(bits.get(step)))),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _marks(runs: Sequence[Sequence[Scored]]) -> list[list[str]]:
    """Return a row for each score and its options: the newest value of each run."""
    newest = list[dict[str, str]]()
    for run_scores in runs:
        cells = dict[str, str]()
        for score in sorted(run_scores, key=lambda score: score.step):
            name = " ".join(filter(None, (score.subject, score.metric, score.options)))
            cells[name] = f"{score.value} at step {score.step:,}"
        newest.append(cells)
    names = dict.fromkeys(name for run_scores in newest for name in run_scores)
    return [
        [name, *(run_scores.get(name, "-") for run_scores in newest)] for name in names
    ]


def _differences(configs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return a row for each differing key, except for paths of the run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [[key, *(str(config.get(key, "-")) for config in configs)] for key in keys]
    return [
        row for row in rows if len({*row[1:]}) > 1 and not row[0].startswith(_IGNORED)
    ]


def _charts(rows: Mapping[str, Sequence[Row]], axis: str | None) -> list[Any]:
    """Return the charts over steps, or over another metric that grows with them."""
    charts = []
    for title, key, from_zero in _CHARTS:
        series = {name: _over(of_run, key, axis) for name, of_run in rows.items()}
        lines = [(name, name) for name in series]
        charts.append(chart(series, title, lines, from_zero))
    return [drawn for drawn in charts if drawn]


def _over(rows: Sequence[Row], key: str, axis: str | None) -> list[Point]:
    """Return a metric over steps, or over a metric that grows evenly with them."""
    points = series_of(rows, key)
    if axis is None:
        return points
    rows_with_axis = [row for row in rows if row.get(axis) and row.get("step")]
    per_step = (
        rows_with_axis[-1][axis] / rows_with_axis[-1]["step"]
        if rows_with_axis
        else None
    )
    return [(x * per_step, y) for x, y in points] if per_step else []
