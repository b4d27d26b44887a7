"""A run's directory: what its starts changed counts for the steps that they took."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from data.config import DataConfig, MixtureSource, Source, WeightChange
from train.cli.schema import to_yaml
from train.config import Config
from train.errors import ConfigError
from train.run.directory import RunDir, read_run
from train.run.metrics import EventLog


def write_run(folder: Path, config: Config, *starts: tuple[int, dict]) -> None:
    (folder / "starts").mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    events = []
    for number, (step, changes) in enumerate(starts, 1):
        text = yaml.safe_dump({"changes": changes, "data_fingerprints": {}})
        (folder / "starts" / f"{number}.yaml").write_text(text)
        events.append({"start": number, "event": "restore", "step": step})
        events.append({"start": number, "event": "idle"})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines)


def test_a_batch_is_of_the_start_that_took_its_step(tmp_path):
    sources = {name: MixtureSource(name, 1.0) for name in ("web", "code")}
    config = Config(data=DataConfig(source=Source.mixture, sources=sources))
    change = [{"step": 12, "weights": {"web": 1.0}}]
    other = {"data.sources.code.path": None, "data.sources.code.weight": None}
    other |= {"data.sources.code.epochs": None, "data.sources.new.path": "new"}
    write_run(
        tmp_path,
        config,
        (0, {}),
        (10, {"data.weight_changes": change}),
        (20, {"train.num_steps": 50, **other}),
    )
    run = replace(config.run, dir=str(tmp_path))
    for step in (0, 9):
        assert read_run(str(tmp_path), step) == replace(config, run=run)
    for step in (10, 19):
        changed = read_run(str(tmp_path), step).data
        assert changed.weight_changes == [WeightChange(12, {"web": 1.0})]
        assert changed.sources == sources
    last = read_run(str(tmp_path))
    assert last == read_run(str(tmp_path), 20)
    assert last.train.num_steps == 50
    assert last.data.sources == {
        "web": sources["web"],
        "new": MixtureSource("new", 1.0),
    }


def test_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no .*config\.yaml"):
        read_run(str(tmp_path))


def test_a_report_that_fails_does_not_hide_how_the_run_ended(
    tmp_path, monkeypatch, caplog
):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.run.directory.write_report", full)
    events = EventLog(tmp_path)
    run = RunDir(tmp_path, Config(), 1, [], None, False, events, True, None)
    events.end(42)
    run.close()
    assert "report.html was not written: [Errno 28]" in caplog.text
    last = (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["code"] == 42
