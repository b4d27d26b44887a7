"""Compare several runs: last and best values, curves, and differences of configs."""

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from train.identity import flatten
from train.run.evaluations import ScoreText, read_scores
from train.run.report import Series, chart, finite_points, series_of
from train.run.starts import newest_start, read_run
from train.run.thinned import Point, thinned_metrics
from train.run.validations import Validations, read_validations
from train.units import format_count

_CHARTS = (  # title, metric, whether the axis starts at zero
    ("Loss", "loss", False),
    ("Validation loss", "eval/loss", False),
    ("Bits per byte", "eval/bits_per_byte", False),
    ("Gradient norm", "grad_norm", True),
    ("Learning rate", "learning_rate", True),
    ("Tokens per second", "tokens_per_second", True),
)
# The metric on each horizontal axis; None is the step.
_AXES = {"step": None, "tokens": "tokens", "FLOPs": "flops"}
_HEADERS = (
    *("", "Steps", "Tokens", "Last loss", "Last validation loss"),
    *("Best validation loss", "At step", "Bits per byte there", "On tokens"),
    *("Loss of whole set", "Bits per byte of whole set"),
)
_IGNORED = ("run.", "tracker.", "runtime.compilation_cache", "data.cache_dir")


def compare_runs(folders: Sequence[epath.Path]) -> dict[str, Any]:
    """Return the content of a page that compares runs, as plain values.

    A table is (title, headers, rows), and `axes` holds the charts of each horizontal
    axis. A run without logged FLOPs is missing from the charts over FLOPs.
    """
    names = [folder.name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    rows = [thinned_metrics(folder).rows for folder in folders]
    runs = dict(zip(names, map(series_of, rows), strict=True))
    cells = [
        [name, *_cells(runs[name], read_validations(folder))]
        for name, folder in zip(names, folders, strict=True)
    ]
    configs = [flatten(read_run(str(folder))) for folder in folders]
    starts = [newest_start(folder) for folder in folders]
    contents = _other_contents(
        configs, [start.get("data_fingerprints") or {} for start in starts]
    )
    scores = _score_rows(list(map(read_scores, folders, rows)))
    return {
        "name": ", ".join(names),
        "tables": [
            ("Runs", [*_HEADERS], cells),
            *([("Newest score of each run", ["", *names], scores)] if scores else []),
            ("Config", ["", *names], [*contents, *_differences(configs)]),
        ],
        "axes": {axis: _charts(runs, metric) for axis, metric in _AXES.items()},
        "restarts": [],
    }


def _cells(series: Series, validations: Validations) -> list[str]:
    """Return the cells of a run under the headers of _HEADERS."""
    last_values = {key: points[-1][1] for key, points in series.items()}
    last, best, targets, whole = validations
    return [
        f"{last_values.get('step') or 0:,.0f}",
        format_count(last_values.get("tokens") or 0),
        _format(last_values.get("loss")),
        _format(last and last.loss),
        _format(best and best.loss),
        *((f"{best.step:,}", _format(best.bits_per_byte)) if best else ("-", "-")),
        "-" if targets is None else format_count(targets),
        _format(whole and whole.loss),
        _format(whole and whole.bits_per_byte),
    ]


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _score_rows(scores_by_run: Sequence[Sequence[ScoreText]]) -> list[list[str]]:
    """Return a row for each score, with the newest value in each run."""
    cells_by_run = list[dict[str, str]]()
    for run_scores in scores_by_run:
        cells = dict[str, str]()
        for score in sorted(run_scores, key=lambda score: score.step):
            name = " ".join(filter(None, (score.subject, score.metric, score.options)))
            cells[name] = f"{score.value} at step {score.step:,}"
        cells_by_run.append(cells)
    names = dict.fromkeys(name for cells in cells_by_run for name in cells)
    return [[name, *(cells.get(name, "-") for cells in cells_by_run)] for name in names]


def _differences(configs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return a row for each config key that differs, without those in _IGNORED."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [
        [key, *(_as_yaml(config.get(key, "-")) for config in configs)] for key in keys
    ]
    return [
        row for row in rows if len({*row[1:]}) > 1 and not row[0].startswith(_IGNORED)
    ]


def _as_yaml(value: object) -> str:
    """Return a config value as it is written in a config file or a command."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(_as_yaml, value))}]"
        case Mapping():
            fields = (f"{key}: {_as_yaml(item)}" for key, item in value.items())
            return f"{{{', '.join(fields)}}}"
    return str(value)


def _other_contents(
    configs: Sequence[Mapping[str, object]], fingerprints: Sequence[Mapping[str, str]]
) -> list[list[str]]:
    """Return a row for each source of data whose content differs between the runs.

    The cells hold the path and the beginning of the fingerprint. They mark content that
    differs from that of another run at the same path.
    """
    rows = list[list[str]]()
    for name in dict.fromkeys(name for by_name in fingerprints for name in by_name):
        key = "data.path" if name == "text" else f"data.sources.{name}.path"
        # Without a path, the text is that of data=python.
        sources = [
            (_as_yaml(config.get(key) or "data=python"), by_name.get(name))
            for config, by_name in zip(configs, fingerprints, strict=True)
        ]
        known = {(path, content) for path, content in sources if content is not None}
        if len({content for _, content in known}) < 2:
            continue
        paths = [path for path, _ in known]
        cells = []
        for path, content in sources:
            mark = " (other content at the same path)" if paths.count(path) > 1 else ""
            cells.append("-" if content is None else f"{path}, {content[:8]}{mark}")
        rows.append([f"content of {key}", *cells])
    return rows


def _charts(runs: Mapping[str, Series], axis: str | None) -> list[Any]:
    """Return the charts over the step, or over the metric `axis` if it is given."""
    charts = []
    for title, key, from_zero in _CHARTS:
        series = {name: _points_over_axis(run, key, axis) for name, run in runs.items()}
        charts.append(chart(series, title, {name: name for name in runs}, from_zero))
    return [content for content in charts if content]


def _points_over_axis(series: Series, key: str, axis: str | None) -> Sequence[Point]:
    """Return the points of a metric over the step, or over the metric `axis`.

    The last value of `axis` scales all steps: `axis` is taken as proportional to them.
    """
    points = series.get(key, ())
    if axis is None:
        return points
    axis_points = [(step, value) for step, value in finite_points(series, axis) if step]
    if not axis_points:
        return []
    step, value = axis_points[-1]
    return [(x * value / step, y) for x, y in points]
