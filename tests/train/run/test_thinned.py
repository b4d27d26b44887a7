"""Metrics of long runs are thinned out as they are read, and keep their shape."""

import json
import random
import tracemalloc
from statistics import median

import pytest

from train.run import thinned
from train.run.report import report_data
from train.run.thinned import thinned_metrics


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thin out short runs too."""
    monkeypatch.setattr(thinned, "_MAX_ROWS", 100)
    monkeypatch.setattr(thinned, "_MAX_STRETCHES", 50)


def write(folder, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)


def rows_of_run(count: int) -> list[dict]:
    rng = random.Random(0)
    rows = []
    for step in range(1, count + 1):
        speed = 100.0 + rng.random()
        rows.append({"step": step, "loss": 5.0 / step, "tokens_per_second": speed})
        if step % 10 == 0:
            rows.append({"step": step, "eval/loss": 2.0 + rng.random()})
    rows[count // 3]["loss"] = 99.0
    rows[count // 2]["loss"] = None
    return rows


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("count", [200, 1000, 3333])
def test_a_long_run_keeps_spikes_ends_and_the_best(tmp_path, count):
    write(tmp_path, rows := rows_of_run(count))
    metrics = thinned_metrics(tmp_path)
    assert metrics.num_missing["loss"] == 1
    for key in ("loss", "eval/loss", "tokens_per_second"):
        all_points = [(row["step"], row[key]) for row in rows if key in row]
        points = [(row["step"], row[key]) for row in metrics.rows if key in row]
        assert set(points) <= set(all_points)
        assert points == sorted(points, key=lambda point: point[0])
        assert (points[0], points[-1]) == (all_points[0], all_points[-1])
        values, all_values = ([v for _, v in p if v] for p in (points, all_points))
        assert (min(values), max(values)) == (min(all_values), max(all_values))
        assert len(points) <= 4 * 50
    key = "tokens_per_second"
    speeds = [row[key] for row in metrics.rows if key in row]
    assert median(speeds) == pytest.approx(100.5, abs=0.2)


@pytest.mark.usefixtures("few")
def test_figures_of_layers_stay_together_and_keep_the_largest(tmp_path):
    rows = [
        {"step": s, **{f"numerics/mlp/{i}": float(s == 333 + i) for i in range(2)}}
        for s in range(1, 1001)
    ]
    write(tmp_path, rows)
    thinned_rows = thinned_metrics(tmp_path).rows
    assert len(thinned_rows) <= 52
    assert all(len(row) == 3 for row in thinned_rows)
    for layer in range(2):
        (row,) = [row for row in thinned_rows if row[f"numerics/mlp/{layer}"]]
        assert abs(row["step"] - 333) < 1000 / 25


def test_the_report_of_a_large_run_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(thinned, "_MAX_ROWS", 1000)
    rows = [{"step": s, "loss": 1.0 / s, "note": "x" * 1000} for s in range(1, 20_001)]
    write(tmp_path, rows)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    del rows
    tracemalloc.start()
    try:
        figures = dict(row[:2] for row in report_data(tmp_path)["figures"])
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    assert figures["Steps"] == "20,000"
    assert figures["Final loss"] == "0.0001"
