"""The directory of a run writes its report and its results when a start ends."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from etils import epath

from train.config import Config, TensorBoardConfig, TrackerConfig
from train.run import report
from train.run.continuation import Continuation
from train.run.directory import RunDir
from train.run.metrics import EventLog
from train.run.this_start import ThisStart

FRESH = Continuation(1, "its identity", [], [])
DEFAULTS = Config()


def start_in(path: epath.Path, config: Config = DEFAULTS) -> ThisStart:
    """Return a start whose data is not recorded."""
    sources: Any = None
    return ThisStart(path, config, sources)


def test_a_report_that_fails_does_not_hide_how_the_run_ended(
    tmp_path, monkeypatch, caplog
):
    def full(path, live=False):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_report", full)
    events = EventLog(tmp_path)
    path = epath.Path(tmp_path)
    run = RunDir(start_in(path), FRESH, events, write=True, lease=None)
    events.end(42)
    run.close()
    assert "report.html was not written: [Errno 28]" in caplog.text
    last = (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["code"] == 42


def test_results_are_json_whatever_the_numbers_are(tmp_path):
    events = EventLog(tmp_path)
    path = epath.Path(tmp_path)
    run = RunDir(start_in(path), FRESH, events, write=True, lease=None)
    nan = float("nan")
    inf = np.float32("inf")
    run.write_results({"step": 3, "eval/loss": nan, "compressed": {"xz": inf}})
    run.close()
    text = (tmp_path / "results.json").read_text()
    results = json.loads(
        text, parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )
    assert results == {"step": 3, "eval/loss": None, "compressed": {"xz": None}}


def test_only_process_0_opens_trackers(tmp_path):
    config = replace(
        Config(), tracker=TrackerConfig(tensorboard=TensorBoardConfig(enabled=True))
    )
    events = EventLog(tmp_path, write=False)
    path = epath.Path(tmp_path)
    run = RunDir(start_in(path, config), FRESH, events, write=False, lease=None)
    run.start_at(0)
    run.log(1, {"loss": 1.0})
    run.close()
    assert list(tmp_path.iterdir()) == []
