import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from etils import epath

from train import metrics
from train.metrics import EventLog, MetricsLog, read_events, read_metrics


def _steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir)]


def _write(run_dir: Path, steps: range, last_step: int) -> None:
    log = MetricsLog(run_dir, last_step)
    for step in steps:
        log.write(step, {"loss": 1.0 / step})
    log.close()


def test_a_restart_leaves_neither_duplicate_nor_missing_steps(tmp_path):
    _write(tmp_path, range(1, 13), last_step=0)  # killed at 12, last saved at 10
    _write(tmp_path, range(11, 16), last_step=10)
    assert _steps(tmp_path) == list(range(1, 16))


def test_a_fresh_start_drops_everything(tmp_path):
    _write(tmp_path, range(1, 5), last_step=0)
    _write(tmp_path, range(1, 3), last_step=0)
    assert _steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3', b"\0\0\0", b"3"])
def test_a_torn_last_line_is_skipped_then_dropped(tmp_path, torn):
    _write(tmp_path, range(1, 3), last_step=0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    assert _steps(tmp_path) == [1, 2]
    _write(tmp_path, range(3, 5), last_step=2)
    assert _steps(tmp_path) == [1, 2, 3, 4]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_kill_during_the_rewrite_loses_nothing(tmp_path, monkeypatch):
    _write(tmp_path, range(1, 6), last_step=0)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def die(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(epath.Path(tmp_path)), "replace", die)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_lines_are_there_when_the_process_is_killed(tmp_path):
    code = (
        "import os, sys\nfrom train.metrics import EventLog, MetricsLog\n"
        "MetricsLog(sys.argv[1], 0).write(1, {'loss': 2.0})\n"
        "EventLog(sys.argv[1]).record('init', 1.0)\n"
        "assert 'jax' not in sys.modules\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(metrics.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert [row["event"] for row in read_events(tmp_path)] == ["init"]


def test_lines_are_valid_json_with_step_first(tmp_path):
    class Scalar:  # as numpy's and JAX's
        def item(self):
            return 0.5

    log = MetricsLog(tmp_path, 0)
    values = {"loss": float("nan"), "grad_norm": float("inf"), "mfu": Scalar()}
    log.write(7, values)
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 7, "loss": null, "grad_norm": null, "mfu": 0.5}\n'


def test_other_processes_touch_nothing(tmp_path):
    run_dir = tmp_path / "run"
    log, events = MetricsLog(run_dir, 0, write=False), EventLog(run_dir, write=False)
    log.write(1, {"loss": 1.0})
    log.flush()
    with events.span("compile"):
        pass
    events.close()
    assert not run_dir.exists()
    assert read_metrics(run_dir) == read_events(run_dir) == []


def test_events_count_starts_and_the_idle_time_between(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(metrics.time, "time", lambda: now)
    events = EventLog(tmp_path)
    events.record("step", 30.0, steps=10)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": 10')  # torn by a kill
    now = 1090.0
    EventLog(tmp_path).record("init", 2.0)
    now = 1050.0  # another host, whose clock is behind
    EventLog(tmp_path)
    assert read_events(tmp_path) == [
        {"time": 1000.0, "start": 1, "event": "step", "seconds": 30.0, "steps": 10},
        {"time": 1090.0, "start": 2, "event": "idle", "seconds": 90.0},
        {"time": 1090.0, "start": 2, "event": "init", "seconds": 2.0},
        {"time": 1050.0, "start": 3, "event": "idle", "seconds": 0.0},
    ]


def test_a_span_is_recorded_also_when_its_body_raises(tmp_path, monkeypatch):
    clock = iter([5.0, 8.5])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    events = EventLog(tmp_path)
    with pytest.raises(RuntimeError), events.span("save", step=4):
        raise RuntimeError
    (row,) = read_events(tmp_path)
    assert (row["event"], row["seconds"], row["step"]) == ("save", 3.5, 4)


def test_threads_do_not_tear_each_others_lines(tmp_path):
    events = EventLog(tmp_path)

    def work() -> None:
        for _ in range(200):
            events.record("save", 1.0, text="x" * 500)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 800


def test_remote_files_are_uploaded_at_intervals_and_by_flush(tmp_path, monkeypatch):
    now, uploads = 0.0, []
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)

    class Bucket:
        """A folder that says it is an object store: no append, no rename."""

        def __init__(self, path):
            self.local, self.parent = Path(path), self

        def __fspath__(self):
            return f"gs://{self.local}"

        def __truediv__(self, name):
            return Bucket(self.local / name)

        def mkdir(self, parents, exist_ok):
            pass

        def exists(self):
            return self.local.exists()

        def read_bytes(self):
            return self.local.read_bytes()

        def write_bytes(self, data):
            uploads.append(now)
            if now == 100:
                raise ConnectionError
            self.local.write_bytes(data)

    monkeypatch.setattr(metrics.epath, "Path", Bucket)
    log = MetricsLog(tmp_path, 0)
    log.write(1, {})
    assert _steps(tmp_path) == []
    log.flush()
    log.flush()
    assert (_steps(tmp_path), uploads) == ([1], [0])
    now = 30
    log.write(2, {})
    now = 100
    log.write(3, {})  # the upload fails: a warning, and the next one has it all
    assert _steps(tmp_path) == [1]
    now = 200
    log.write(4, {})
    assert (_steps(tmp_path), uploads) == ([1, 2, 3, 4], [0, 100, 200])
    log.close()
    MetricsLog(tmp_path, 3).close()
    assert _steps(tmp_path) == [1, 2, 3]
