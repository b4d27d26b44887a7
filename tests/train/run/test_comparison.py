"""The report of several runs compares them on one page and on the console."""

import json

import pytest
from etils import epath

from tests.train.pages import data_of, drawn
from train.cli.schema import config_yaml
from train.config import Config, OptimizerConfig
from train.errors import ConfigError
from train.report import ReportConfig, main
from train.run.comparison import compare_runs
from train.run.evaluations import write_evaluation


def _run(folder, rate: float, flops: float | None, steps=(10, 20)):
    folder.mkdir()
    config = Config(optimizer=OptimizerConfig(learning_rate=rate))
    (folder / "config.yaml").write_text(config_yaml(config))
    rows = [
        {"step": s, "loss": rate / s, "tokens": 100 * s}
        | ({"flops": flops * s} if flops else {})
        for s in steps
    ]
    rows.insert(1, {"step": 15, "eval/loss": 2.0, "eval/bits_per_byte": 1.0})
    scores = {"tasks/piqa/acc_stderr": 0.25, "tasks/piqa/acc": rate}
    rows += [{"step": s, **scores} for s in steps if flops]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def test_two_runs_are_compared(tmp_path, capsys):
    runs = [_run(tmp_path / "a", 0.1, 1e12), _run(tmp_path / "b", 0.2, None)]
    for run, step, accuracy in ((0, 20, 0.5), (0, 9, 0.25), (1, 9, 0.75)):
        options = {"tasks": ["piqa"], "limit": 3, "num_fewshot": None}
        write_evaluation(
            epath.Path(runs[run]), step, options, {"tasks/piqa/acc": accuracy}
        )
    page = tmp_path / "ab.html"
    assert main(ReportConfig(runs, str(page))) == 0
    data = data_of(page.read_text())
    (_, _, figures), (_, _, marks), (_, _, differences) = data["tables"]
    assert marks == [
        ["piqa acc limit=3", "0.5000 at step 20", "0.7500 at step 9"],
        ["piqa acc while training", "0.1000 ± 0.2500 at step 20", "-"],
    ]
    assert figures[0][:5] == ["a", "20", "2K", "0.0050", "2.0000"]
    assert differences == [["optimizer.learning_rate", "0.1", "0.2"]]
    loss, validation, *_ = data["axes"]["tokens"]
    a, b = loss["lines"]
    assert a == {"name": "a", "points": [[1000, 0.01], [2000, 0.005]]}
    assert validation["lines"][1]["points"] == [[1500, 2.0]]
    assert b["points"][0] == [1000, 0.02]
    over_flops = data["axes"]["FLOPs"][0]["lines"]
    assert [len(line["points"]) for line in over_flops] == [2, 0]
    drawing = drawn(page.read_text())
    assert ("value", "FLOPs") in drawing.attributes
    assert "optimizer.learning_rate\n0.1\n0.2" in drawing.text
    assert "optimizer.learning_rate" in capsys.readouterr().out


def test_settings_are_written_as_in_a_command_below_the_curves(tmp_path):
    runs = [_run(tmp_path / "a", 0.1, 1e12), _run(tmp_path / "b", 0.1, 1e12)]
    settings = "document_mask: false, document_start: null, skip_batches: [1, 2]"
    (tmp_path / "b" / "config.yaml").write_text(f"data: {{path: null, {settings}}}\n")
    page = tmp_path / "ab.html"
    main(ReportConfig(runs, str(page)))
    data = data_of(page.read_text())
    rows = {key: cells for key, *cells in data["tables"][-1][2]}
    assert rows["data.document_mask"] == ["true", "false"]
    assert rows["data.skip_batches"] == ["[]", "[1, 2]"]
    cells = [cell for row in rows.values() for cell in row]
    assert not {"None", "True", "False"} & {*cells}
    drawing = drawn(page.read_text())
    assert drawing.text.index("\nLoss\n") < drawing.text.index("\nConfig\n")
    assert drawing.text.index("\nRuns\n") < drawing.text.index("\nLoss\n")
    assert "disabled" not in [name for name, _ in drawing.attributes]
    pressed = [value for name, value in drawing.attributes if name == "aria-pressed"]
    assert pressed == ["true", "false", "false"]


@pytest.mark.parametrize(
    ("paths", "contents", "cells"),
    [
        (("t", "t"), ("aaaaaaaaa", "bbbbbbbbb"), ("t, aaaaaaaa{}", "t, bbbbbbbb{}")),
        (("t", "u"), ("aaaaaaaaa", "bbbbbbbbb"), ("t, aaaaaaaa", "u, bbbbbbbb")),
        (("t", "t"), ("aaaaaaaaa", "aaaaaaaaa"), None),
        (("t", "u"), ("aaaaaaaaa", "aaaaaaaaa"), None),
        (("t", "t"), ("aaaaaaaaa", None), None),
        (
            ("null", "null"),
            ("aaaaaaaaa", "bbbbbbbbb"),
            ("data=python, aaaaaaaa{}", "data=python, bbbbbbbb{}"),
        ),
    ],
)
def test_other_data_at_the_same_path_are_marked(tmp_path, paths, contents, cells):
    folders = []
    for name, path, content in zip("ab", paths, contents, strict=True):
        folder = epath.Path(_run(tmp_path / name, 0.1, None))
        (folder / "config.yaml").write_text(
            f"data: {{path: {path}, document_start: true}}\n"
        )
        if content is not None:
            (folder / "starts").mkdir()
            record = f"data_fingerprints: {{text: {content}}}\nchanges: {{}}\n"
            (folder / "starts" / "1.yaml").write_text(record)
        folders.append(folder)
    rows = [
        row for row in compare_runs(folders)["tables"][-1][2] if "content" in row[0]
    ]
    mark = " (other content at the same path)"
    expected = [] if cells is None else [cell.format(mark) for cell in cells]
    assert rows == ([["content of data.path", *expected]] if expected else [])


def test_the_best_and_the_last_validation_loss_of_each_run_are_shown(
    tmp_path,
):
    """The best loss may be that of step 0."""
    losses = {"up": {0: 2.0, 10: 3.0, 20: 2.5}, "down": {0: 4.0, 10: 3.0, 20: 2.0}}
    for name, run_losses in losses.items():
        _run(tmp_path / name, 0.1, None)
        rows = [
            {"step": step, "eval/loss": loss, "eval/bits_per_byte": loss / 2}
            for step, loss in run_losses.items()
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    data = compare_runs([epath.Path(tmp_path / name) for name in losses])
    (_, headers, figures), *_ = data["tables"]
    up, down = (dict(zip(headers, row, strict=True)) for row in figures)
    names = "Last validation loss", "Best validation loss", "At step"
    assert [up[name] for name in names] == ["2.5000", "2.0000", "0"]
    assert [down[name] for name in names] == ["2.0000", "2.0000", "20"]
    assert up["Bits per byte there"] == down["Bits per byte there"] == "1.0000"


def test_a_run_that_is_named_twice_is_one(tmp_path, capsys):
    run = _run(tmp_path / "a", 0.1, None)
    main(ReportConfig([run, f"{run}/"]))
    assert capsys.readouterr().out == f"{tmp_path}/a/report.html\n"


def test_an_output_that_cannot_be_written_is_a_mistake(tmp_path):
    runs = [_run(tmp_path / name, 0.1, None) for name in "ab"]
    for output in ("http://host/x.html", f"{runs[0]}/config.yaml/x.html"):
        with pytest.raises(ConfigError, match="output = "):
            main(ReportConfig(runs, output))
    (tmp_path / "b/report.html").mkdir()  # even root cannot replace it
    with pytest.raises(ConfigError, match=r"runs = .*\n.*report\.html cannot be"):
        main(ReportConfig(runs[1:]))


def test_each_folder_without_a_run_is_named(tmp_path):
    run = _run(tmp_path / "a", 0.1, None)
    with pytest.raises(ConfigError) as error:
        main(ReportConfig([run, f"{tmp_path}/b", f"{tmp_path}/c"]))
    values = [mistake.value for mistake in error.value.mistakes]
    assert values == [f"{tmp_path}/b", f"{tmp_path}/c"]
