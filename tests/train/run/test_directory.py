"""A run's directory, open for a start."""

import json

from etils import epath

from train.config import Config
from train.run.continuation import Continuation
from train.run.directory import RunDir
from train.run.metrics import EventLog


def test_a_report_that_fails_does_not_hide_how_the_run_ended(
    tmp_path, monkeypatch, caplog
):
    def full(path, live=False):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.run.report.write_report", full)
    events, path = EventLog(tmp_path), epath.Path(tmp_path)
    fresh = Continuation(1, [], [], None, False)
    run = RunDir(path, Config(), fresh, events, write=True, lease=None)
    events.end(42)
    run.close()
    assert "report.html was not written: [Errno 28]" in caplog.text
    last = (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["code"] == 42
