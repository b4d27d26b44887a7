"""The report shows the metrics and events of a run, whatever values they contain."""

import json

import pytest
from etils import epath

from tests.train.pages import Page, data_of, drawn
from train.run.evaluations import write_evaluation
from train.run.report import report_data, write_report


def _write(run_dir, metrics=(), events=(), config=None):
    for name, rows in (("metrics", metrics), ("events", events)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / f"{name}.jsonl").write_text(lines)
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    return write_report(run_dir).read_text()


def _row(step: int, **values):
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 3e-4,
        "tokens": 1000 * step,
        "tokens_per_second": 2e6,
        "mfu": 0.4,
        **values,
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
    data = data_of(_write(tmp_path, rows, EVENTS, config))
    assert (data["name"], data["config"]) == ("base-1b", config)
    assert list(map(tuple, data["figures"])) == [
        ("Steps", "10", "of 2,000"),
        ("Tokens", "10K", ""),
        ("Final loss", "1.0000", "1 not finite"),
        ("Best validation loss", "2.2500", "0.7321 bits per byte, at step 5"),
        ("Wall time", "3 min 20 s", "2 starts"),
        ("Goodput", "40.0%", "1 steps done again"),
        ("Tokens per second", "2M", "median"),
        ("MFU", "40.0%", "median"),
    ]


def test_scores_are_shown_with_their_standard_errors(tmp_path):
    scores = {"tasks/a/acc": 0.5, "tasks/a/acc_stderr": 0.125}
    options = {"tasks": ["a"], "limit": 7.0, "num_fewshot": 5}
    folder = epath.Path(tmp_path)
    file = write_evaluation(folder, 8, options, scores)
    second_file = write_evaluation(folder, 8, options, scores | {"tasks/a/acc": 0.75})
    assert file == second_file
    sets = {"sets": {"web": "stores/web"}, "num_batches": None}
    write_evaluation(
        folder, 10, sets, {"eval_whole/loss": 2.0, "eval_whole/web/loss": 3.0}
    )
    older_rows = [{"step": s, "tasks/a/acc": s / 100, "loss": 1.0} for s in (5, 9)]
    html = _write(tmp_path, older_rows)
    ((title, _, rows),) = data_of(html)["tables"]
    assert (title, rows) == (
        "Scores",
        [
            ["a", "acc", "0.0900", "9", "while training"],
            ["a", "acc", "0.7500 ± 0.1250", "8", "limit=7 num_fewshot=5"],
            ["validation, whole", "loss", "2.0000", "10", ""],
            ["web, whole", "loss", "3.0000", "10", ""],
        ],
    )
    assert "\na\nacc\n0.7500 ± 0.1250\n8\nlimit=7 num_fewshot=5\n" in drawn(html).text


@pytest.mark.parametrize("text", ["Once\nupon <b>a</b> time", "", "\x1b[2J é 中"])
def test_the_sample_of_a_finished_run_is_on_the_page(tmp_path, text):
    _write(tmp_path, [_row(1)])
    results = {"step": 1200, "sample": text}
    (tmp_path / "results.json").write_text(json.dumps(results))
    html = write_report(tmp_path).read_text()
    assert data_of(html)["sample"] == {"step": 1200, "text": text}
    page_text = drawn(html).text
    assert "Sample at step" in page_text
    assert text.strip().split("\n")[-1] in page_text


def test_axes_have_names_and_the_page_has_controls(tmp_path):
    rows = [_row(step, memory_bytes=2.0**30 + step) for step in (1, 2, 3)]
    html = _write(tmp_path, rows)
    assert ["Memory of the device", "1.00 GiB", "highest"] in data_of(html)["figures"]
    page = drawn(html)
    charts = len(data_of(html)["charts"])
    assert page.attributes.count(("class", "name")) == charts
    assert "\nnats a token\nstep\n" in page.text
    assert "\nbytes\nstep\n" in page.text
    for name in ("smoothing", "log_x", "log_y"):
        assert ("id", name) in page.attributes


def test_the_buckets_of_goodput_add_up_to_the_wall_time(tmp_path):
    goodput = data_of(_write(tmp_path, [], EVENTS))["goodput"]
    seconds = {part["title"]: part["seconds"] for part in goodput["buckets"]}
    assert seconds == {
        **{"steps": 80, "idle between starts": 40, "steps done again": 20},
        **{"data wait": 20, "not recorded": 20, "accelerator init": 10, "restore": 10},
    }
    parts = [part for start in goodput["starts"] for part in start["buckets"]]
    assert sum(part["seconds"] for part in parts) == goodput["wall_s"] == 200
    assert [(start["name"], start["note"]) for start in goodput["starts"]] == [
        ("Start 1", "step 0 to 5, unknown, left no exit code"),
        ("Start 2", "step 4 to 4, preempted"),
    ]


def test_the_page_draws_every_section(tmp_path):
    html = _write(tmp_path, [_row(step) for step in (1, 5, 8)], EVENTS, "a: 1")
    page = drawn(html)
    for text in ("Loss", "Learning rate", "Where the time went", "a: 1"):
        assert f"\n{text}\n" in page.text
    assert "\nsteps\n1 min 20 s\n40.0%\nidle between starts\n40 s\n20.0%" in page.text
    # A later start continued from step 4 of 1 to 8, on each of the four charts.
    assert page.attributes.count(("d", "M42.86 0V100")) == 4
    assert "a later start went on" in page.text


def test_a_later_start_from_step_0_is_a_restart_too(tmp_path):
    restore = EVENTS[3] | {"step": 0}
    assert data_of(_write(tmp_path, [], [restore]))["restarts"] == [0]
    first_start = [{**event, "start": 1} for event in EVENTS]
    page = drawn(_write(tmp_path, [_row(1), _row(8)], first_start))
    assert ("class", "restart") not in page.attributes


def test_hostile_text_stays_text(tmp_path):
    hostile_text = "</script></pre><script>alert(1)</script><b>'\"&"
    config = f"run:\n  name: {json.dumps(hostile_text)}\n"
    html = _write(tmp_path, [_row(1)], [], config)
    assert Page(html).tags == Page(_write(tmp_path, [], [], "")).tags
    clean_page = drawn(_write(tmp_path, [_row(1)], [], "run:\n  name: x"))
    page = drawn(html)
    assert page.tags == clean_page.tags
    assert page.text.startswith(hostile_text)


ROWS = [
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
]


@pytest.mark.parametrize("rows", ROWS)
def test_odd_runs_still_get_a_whole_page(tmp_path, rows):
    html = _write(tmp_path, rows)
    logged = any("step" in row for row in rows)
    assert data_of(html)["name"] == tmp_path.name
    assert bool(data_of(html)["figures"]) == logged
    text = drawn(html).text
    assert ("Nothing has been logged" in text) != logged
    assert not {"NaN", "Infinity", "undefined", "null"} & set(text.split())


def test_a_directory_without_files_gets_a_page(tmp_path):
    assert data_of(write_report(tmp_path).read_text())["figures"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_lone_point_is_a_dot_and_a_null_breaks_the_line(tmp_path):
    page = drawn(_write(tmp_path, [{"step": 5, "loss": 2.0}]))
    assert ("d", "M100.00 50.00h0") in page.attributes
    rows = [{"step": s, "loss": None if s == 3 else 2.0} for s in range(6)]
    page = drawn(_write(tmp_path, rows))
    lines = [value for name, value in page.attributes if name == "d" and "L" in value]
    assert [c for c in lines[0] if c in "ML"] == ["M", "L", "L", "M", "L"]


def test_100k_lines_are_thinned_and_keep_their_extremes(tmp_path):
    rows = [{"step": s, "loss": 5 - s / 50_000} for s in range(100_000)]
    rows[54_321]["loss"] = 9.0
    rows[77_777]["loss"] = 1.0
    html = _write(tmp_path, rows)
    points = data_of(html)["charts"][0]["lines"][0]["points"]
    assert len(points) < 1010
    assert [54_321, 9.0] in points
    assert [77_777, 1.0] in points
    steps = [step for step, _ in points]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert len(html) < 100_000


def test_a_spike_does_not_flatten_the_rest(tmp_path):
    rows = [{"step": s, "grad_norm": 1e4 if s == 50 else 1.0} for s in range(200)]
    html = _write(tmp_path, rows)
    chart = data_of(html)["charts"][0]
    assert chart["y"] == pytest.approx([0, 3.15])
    assert [50, 1e4] in chart["lines"][0]["points"]
    text = drawn(html).text
    assert "spikes cut, up to 10K" in text
    assert "\n0\n1\n2\n3\n0\n50\n100\n150\n" in text  # both axes


def test_every_metric_has_a_chart_except_errors_and_figures_of_layers(tmp_path):
    rows = [
        _row(step)
        | {"eval/web/loss": step, "eval/code/loss": 2.0, "targets": 8.0}
        | {"tasks/a/acc": 0.5, "tasks/b/acc": 0.25, "tasks/b/acc_stderr": 0.1}
        | {"tasks/a/exact_match/strict": 0.0, "tasks/a/exact_match_stderr/strict": 0.1}
        | {"new": step, "new/0": step, "numerics/new/0": 1.0}
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = report_data(tmp_path)
    charts = {c["title"]: [line["name"] for line in c["lines"]] for c in data["charts"]}
    for title in ("Loss", "Gradient norm", "Learning rate", "Tokens per second"):
        del charts[title]
    assert charts == {
        "Loss of validation sets": ["web", "code"],
        "Tasks: acc": ["a", "b"],
        "Tasks: exact_match/strict": ["a"],
        "new": ["new"],
    }
    assert [picture["title"] for picture in data["heat_maps"]] == ["new"]
