import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.train.run.trackers.sessions import begin
from train.config import TensorBoardConfig, TrackerConfig, WandbConfig
from train.run import tracker
from train.run.trackers.writer import Line, TrackedRun, Writer

CONFIG = TrackerConfig(WandbConfig(enabled=True))


class FakeWriter(Writer):
    """A writer that keeps lines in memory."""

    name = "wandb"
    lines: list[Line]

    def __init__(self, *_):
        self.lines = []
        self.closed = False

    def open(self, folder, marked):
        return marked

    def write(self, lines: Sequence[Line]):
        self.lines += lines

    def close(self):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    """Replace the writer of W&B in each start, and return the replacement."""
    writer = FakeWriter()
    monkeypatch.setattr(tracker, "WandbWriter", lambda run, config: writer)
    return writer


def _warnings(caplog) -> list[str]:
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def test_no_tracker_touches_nothing(tmp_path):
    run = tracker.open_tracker(TrackerConfig(), TrackedRun(tmp_path, "tiny", {}))
    run.log(1, {"loss": 1.0})
    run.finish()
    assert list(tmp_path.iterdir()) == []


def test_steps_logged_before_the_tracker_is_open_are_kept(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(fake, "open", lambda *_: time.sleep(0.1) or -1)
    begin(CONFIG, tmp_path, 1, 0, 2).finish()
    assert [step for step, _ in fake.lines] == [1, 2]
    assert fake.closed


def test_lines_that_a_tracker_has_are_not_written_again(tmp_path, fake):
    begin(CONFIG, tmp_path, 1, 0, 5).finish()
    begin(CONFIG, tmp_path, 2, 2, 7).finish()
    steps = [step for step, values in fake.lines if "loss" in values]
    assert steps == list(range(1, 8))


@pytest.mark.parametrize("broken", ["folder", "open", "write", "close"])
@pytest.mark.parametrize("error", [RuntimeError("a\nb"), SystemExit(1)])
def test_an_error_is_logged_once_as_a_warning_of_one_line(
    tmp_path, fake, monkeypatch, caplog, broken, error
):
    def fail(*_):
        raise error

    if broken == "folder":
        (tmp_path / "wandb").write_text("in the way")
    else:
        monkeypatch.setattr(fake, broken, fail)
    run = begin(CONFIG, tmp_path, 1, 0, 3)
    run.finish()
    run.log(9, {"loss": 1.0})
    (warning,) = _warnings(caplog)
    assert "wandb is off" in warning
    assert "\n" not in warning


def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    begin(CONFIG, tmp_path, 1, 0, 1).finish()
    (warning,) = _warnings(caplog)
    assert warning.endswith("pip install -e '.[wandb]'")


@pytest.mark.parametrize("hangs", ["open", "write"])
def test_a_tracker_that_hangs_costs_no_time_and_one_warning(
    tmp_path, fake, monkeypatch, caplog, hangs
):
    release = threading.Event()
    monkeypatch.setattr(tracker, "FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tracker, "_SILENT_S", 0.05)
    monkeypatch.setattr(fake, hangs, lambda *_: release.wait(60) and -1)
    start_time = time.monotonic()
    run = begin(CONFIG, tmp_path, 1, 0, 3)
    assert time.monotonic() - start_time < 30
    for _ in range(500):
        run.log(9, {"loss": 1.0})
        if _warnings(caplog):
            break
        time.sleep(0.02)
    run.finish()
    (warning,) = _warnings(caplog)
    assert "has not answered" in warning
    release.set()
    run._threads[0]._thread.join(5)
    assert len(_warnings(caplog)) == 1  # later errors are not reported


def test_lines_that_wait_are_bounded(tmp_path, fake, monkeypatch, caplog):
    release = threading.Event()
    monkeypatch.setattr(tracker, "_MAX_WAITING", 5)
    monkeypatch.setattr(fake, "open", lambda _, marked: release.wait(60) and marked)
    run = begin(CONFIG, tmp_path, 1, 0, 9)
    (warning,) = _warnings(caplog)
    assert "5 lines wait for it" in warning
    release.set()
    run.finish()
    begin(CONFIG, tmp_path, 2, 9, 10).finish()
    steps = [step for step, values in fake.lines if "loss" in values]
    assert steps == list(range(1, 11))


def test_a_tracker_that_fails_does_not_stop_another(
    tmp_path, fake, monkeypatch, caplog
):
    failing_writer = FakeWriter()
    monkeypatch.setattr(failing_writer, "name", "tensorboard")
    monkeypatch.setattr(tracker, "TensorBoardWriter", lambda run: failing_writer)
    monkeypatch.setattr(failing_writer, "write", lambda _: 1 / 0)
    config = replace(CONFIG, tensorboard=TensorBoardConfig(enabled=True))
    begin(config, tmp_path, 1, 0, 2).finish()
    assert [step for step, _ in fake.lines] == [1, 2]
    assert _warnings(caplog) == ["tensorboard is off from here on: division by zero"]


def test_the_id_of_a_run_is_drawn_once(tmp_path):
    run = TrackedRun(tmp_path, "x", {})
    ids = {run.run_id("wandb", lambda n=n: f"{n}") for n in range(2)}
    assert ids == {(tmp_path / "wandb/run_id").read_text().strip()}
