import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.program import program_code
from train.config import TrackerConfig, WandbConfig
from train.run.tracker import open_tracker
from train.run.trackers.writer import TrackedRun

SESSION = """
import sys, time
from etils import epath
from train.config import TrackerConfig, WandbConfig
from train.run.tracker import open_tracker
from train.run.trackers.writer import TrackedRun
began = time.monotonic()
config = TrackerConfig(WandbConfig(enabled=True))
run_dir = epath.Path(sys.argv[1])
run = open_tracker(config, TrackedRun(run_dir, "tiny", {"model": {"num_layers": 2}}))
for step in range(int(sys.argv[2]), int(sys.argv[3])):
    run.log(step, {"loss": float("nan") if step == 3 else 1 / step, "eval/loss": 2.0})
waited = time.monotonic() - began
run.finish()
assert waited < 0.2, f"training waited {waited} s for wandb"
assert "jax" not in sys.modules
"""


def _records(path: Path) -> list:
    """Read a file of wandb: after a header, LevelDB's log format holds protobufs."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    offset = 7
    record = b""
    records = []
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        size = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]  # 1 whole, 2 first, 3 middle, 4 last
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            records.append(message)
            record = b""
    return records


def _history(path: Path) -> list[dict]:
    rows = [record.history for record in _records(path) if record.HasField("history")]
    return [
        {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in row.item
        }
        for row in rows
    ]


def test_two_sessions_are_one_run_and_all_files_lie_in_its_folder(tmp_path):
    for name in ("home", "cwd"):
        (tmp_path / name).mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG"))}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPOSITORY)}
    for first, last in [("1", "6"), ("6", "11")]:
        result = subprocess.run(
            [sys.executable, "-c", program_code(SESSION), "../run", first, last],
            cwd=tmp_path / "cwd",
            env=env,
            capture_output=True,
            text=True,
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list((tmp_path / "home").iterdir()) == []
    assert list((tmp_path / "cwd").iterdir()) == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["wandb"]
    run_id = (tmp_path / "run/wandb/run_id").read_text().strip()
    files = sorted((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    history = [row for file in files for row in _history(file)]
    assert [row["step"] for row in history] == list(range(1, 11))
    # A server accepts only steps that continue from those of the first session.
    assert [row["_step"] for row in history] == list(range(1, 11))
    assert history[4]["loss"] == 0.2
    metrics = [r.metric for r in _records(files[0]) if r.HasField("metric")]
    assert {m.step_metric for m in metrics if m.glob_name == "*"} == {"step"}
    assert not list((tmp_path / "run").rglob("wandb-metadata.json"))
    assert not list((tmp_path / "run").rglob("requirements.txt"))


class FakeRun:
    starting_step = 0

    def __init__(self):
        self.logged = []

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    """Replace wandb; `fake.run` records lines, `fake.init_kwargs` holds the call."""
    monkeypatch.setenv("WANDB_CACHE_DIR", "put back after the test")
    monkeypatch.setenv("WANDB_SILENT", "put back after the test")
    module = types.ModuleType("wandb")
    vars(module).update(run=FakeRun(), init_kwargs={})

    class Settings(dict):
        model_fields = dict.fromkeys(["silent", "console"])

    def init(**kwargs):
        module.init_kwargs.update(kwargs)
        return module.run

    vars(module).update(Settings=Settings, init=init)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def _use(run_dir, mode="offline"):
    config = TrackerConfig(WandbConfig(enabled=True, mode=mode))
    run = open_tracker(config, TrackedRun(run_dir, "tiny", {}))
    for step in range(1, 4):
        run.log(step, {"loss": 1.0})
    run.finish()


def _warnings(caplog) -> list[str]:
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "abc"}, "online"),
        ({"NETRC": "netrc"}, "online"),
        (
            {"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.com:8080/x"},
            "offline",
        ),
    ],
)
def test_online_without_a_key_is_offline_with_a_warning(
    tmp_path, fake, monkeypatch, caplog, variables, mode
):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", "none")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _use(tmp_path / "run", mode="online")
    assert fake.init_kwargs["mode"] == mode
    assert len(_warnings(caplog)) == (mode == "offline")
