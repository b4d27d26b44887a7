import json
import re

import pytest

from tests.train.pages import Page
from train.run import charts
from train.run.charts import thin
from train.run.goodput import BUCKETS
from train.run.report import write_report


def _write(run_dir, metrics=(), events=(), config=None):
    for name, rows in (("metrics", metrics), ("events", events)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / f"{name}.jsonl").write_text(lines)
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    return write_report(run_dir).read_text()


def _lines(html: str) -> list[dict]:
    """The lines of all charts, as the tooltips see them."""
    charts = [json.loads(s) for s in Page(html).scripts if s.startswith("{")]
    return [line for chart in charts for line in chart["lines"]]


def _row(step: int, **more):
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 3e-4,
        "tokens": 1000 * step,
        "tokens_per_second": 2e6,
        "mfu": 0.4,
        **more,
    }


EVENTS = [
    {"time": 1010.0, "start": 1, "event": "init", "seconds": 10.0},
    {"time": 1110.0, "start": 1, "event": "step", "seconds": 100.0, "steps": 5},
    {"time": 1150.0, "start": 2, "event": "idle", "seconds": 40.0},
    {"time": 1160.0, "start": 2, "event": "restore", "seconds": 10.0, "step": 4},
    {"time": 1200.0, "start": 2, "event": "data_wait", "seconds": 20.0},
    {"time": 1200.0, "start": 2, "event": "end", "seconds": 0.0, "code": 42},
]


def test_headline_figures(tmp_path):
    rows = [_row(step) for step in range(1, 11)]
    rows[4] |= {"eval/loss": 2.25, "eval/bits_per_byte": 0.7321}
    rows[9] |= {"eval/loss": 2.5, "eval/bits_per_byte": 0.8}
    rows[6]["loss"] = None
    config = "run:\n  name: base-1b\ntrain:\n  num_steps: 2000\n"
    text = Page(_write(tmp_path, rows, EVENTS, config)).text
    for figure in (
        *("base-1b", "10\nof 2,000", "10K", "1.0000\n1 not finite"),
        *("2.2500\n0.7321 bits per byte, at step 5", "3 min 20 s\n2 starts"),
        *("40.0%\n1 steps done again",),
        *("2M\nmedian", "40.0%\nmedian"),
    ):
        assert f"\n{figure}\n" in text


def test_where_the_time_went_adds_up(tmp_path):
    page = _write(tmp_path, [], EVENTS)
    cells = re.findall(r"<tr><td><i [^>]*></i>(.*?)</td>.*?(\d+\.\d)%</td>", page)
    assert cells == [
        *[("steps", "40.0"), ("idle between starts", "20.0")],
        *[
            ("steps done again", "10.0"),
            ("data wait", "10.0"),
            ("not recorded", "10.0"),
        ],
        *[("accelerator init", "5.0"), ("restore", "5.0")],
    ]
    bars = re.findall(r'<div class="bar">(.*?)</div>', page)
    assert len(bars) == 3  # of all, and of each start
    for bar in bars:
        shares = map(float, re.findall(r"flex-grow:([\d.]+)", bar))
        assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert "Start 1<small>no step" not in page
    labels = re.findall(r"<span>(Start .*?)</small>", page)
    assert labels == [
        "Start 1<small>step 0 to 5, unknown, left no exit code",
        "Start 2<small>step 4 to 4, preempted",
    ]


def test_every_bucket_has_a_color_of_its_own(tmp_path):
    page = _write(tmp_path, [], EVENTS)
    light = page.partition("@media")[0]
    colors = [re.findall(rf"--{name}: (#\w+);", light) for name in BUCKETS]
    assert all(len(found) == 1 for found in colors)
    assert len({found[0] for found in colors}) == len(BUCKETS)


def test_restarts_are_marked_where_they_went_on(tmp_path):
    page = _write(tmp_path, [_row(step) for step in (1, 5, 8)], EVENTS)
    # Step 4 of 1 to 8, on each of four charts.
    assert page.count('class="restart" d="M42.86 0V100"') == 4
    assert "a later start went on" in page
    first_only = [{**event, "start": 1} for event in EVENTS]
    assert 'class="restart"' not in _write(tmp_path, [_row(1), _row(8)], first_only)


def test_hostile_text_stays_text(tmp_path):
    bad = "</script></pre><script>alert(1)</script><b>'\"&"
    events = [{"time": 5.0, "start": 1, "event": bad, "seconds": 1.0}]
    config = f"run:\n  name: {json.dumps(bad)}\n"
    clean = Page(_write(tmp_path, [_row(1)], [{**events[0], "event": "x"}], "run:\n"))
    page = Page(_write(tmp_path, [_row(1)], events, config))
    assert page.tags == clean.tags
    assert page.text.count(bad) >= 2


def test_nothing_is_fetched(tmp_path):
    html = _write(tmp_path, [_row(1), _row(2)], EVENTS, "run: {}\n")
    page = Page(html)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    for fetched in ("http:", "https:", "url(", "@import", "import(", "fetch("):
        assert fetched not in html


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [_row(1)],
        [{**_row(1), "step": 0}],
        [_row(1, loss=None)],
        [_row(1, loss="2.0")],
        [_row(step, loss=None, grad_norm=None) for step in range(1, 60)],
        [_row(step, loss=2.0, grad_norm=0.0) for step in range(1, 60)],
        [{"step": 3, "eval/loss": 2.0}],
        [{"loss": 2.0}],
        [_row(1, loss=-3.0), _row(2, loss=1e30)],
    ],
)
@pytest.mark.parametrize("config", [None, "", "just text", "a: [", "run: 3"])
def test_odd_runs_still_get_a_whole_page(tmp_path, rows, config):
    page = Page(_write(tmp_path, rows, [], config))
    assert tmp_path.name in page.text
    assert ("Nothing has been logged" in page.text) == (
        not any("step" in row for row in rows)
    )
    assert not re.search(r"\bnan\b|\binf\b", page.text)


def test_a_directory_without_files_gets_a_page(tmp_path):
    assert "Nothing has been logged" in write_report(tmp_path).read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_lone_point_is_a_dot_and_a_null_breaks_the_line(tmp_path):
    html = _write(tmp_path, [{"step": 5, "loss": 2.0}])
    assert re.search(r'class="dots s0" d="M100.00 \d+.\d+h0"', html)
    rows = [{"step": s, "loss": None if s == 3 else 2.0} for s in range(6)]
    path = re.findall(r'class="line s0" d="([^"]+)"', _write(tmp_path, rows))[0]
    assert re.findall("[ML]", path) == ["M", "L", "L", "M", "L"]


def test_100k_lines_are_thinned_and_keep_their_extremes(tmp_path):
    rows = [{"step": s, "loss": 5 - s / 50_000} for s in range(100_000)]
    rows[54_321]["loss"], rows[77_777]["loss"] = 9.0, 1.0
    html = _write(tmp_path, rows)
    (line,) = _lines(html)
    assert len(line["points"]) < 1010
    assert [54_321, 9.0] in line["points"]
    assert [77_777, 1.0] in line["points"]
    steps = [step for step, _ in line["points"]]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert len(html) < 100_000


def test_a_long_stretch_of_nulls_stays_a_gap():
    points = [(s, None if 4000 <= s < 6000 else 1.0) for s in range(10_000)]
    gap = [step for step, value in thin(points) if value is None]
    assert 4000 <= gap[0] < 4100
    assert 5900 < gap[-1] < 6000


def test_a_spike_does_not_flatten_the_rest(tmp_path):
    rows = [{"step": s, "grad_norm": 1e4 if s == 50 else 1.0} for s in range(200)]
    html = _write(tmp_path, rows)
    assert "spikes cut, up to 10K" in html
    assert ">3</span>" in html  # the axis goes to about three times the rest
    (line,) = _lines(html)
    assert [50, 1e4] in line["points"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 20_000, [0, 5000, 10_000, 15_000, 20_000]),
        (2.5, 11.0, [2.5, 5, 7.5, 10]),
        (0, 3.15e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-0.5, 0.5, [-0.5, -0.25, 0, 0.25, 0.5]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert charts.ticks(low, high, 4) == pytest.approx(ticks)


def test_labels_of_a_narrow_range_differ(tmp_path):
    rows = [{"step": s, "loss": 2.9200 + 0.0001 * s} for s in range(10)]
    html = _write(tmp_path, rows)
    labels = re.findall(r'<span class="y"[^>]*>([^<]*)</span>', html)
    assert len(labels) == len(set(labels)) >= 3
