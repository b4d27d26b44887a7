"""`train.status` reports the state of every run, on disks and in stores."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from tests.fleet import REPOSITORY
from tests.program import module_option
from tests.train import command_runs
from train import status as status_module
from train.config import RunConfig
from train.liveness import Owner
from train.run.metrics import EventLog, open_metrics
from train.status import StatusConfig, main, read_status

OWNER = Owner.current()
CONFIG = "data:\n  document_start: true\ntrain:\n  num_steps: 80\n"
# Pytest finds the fixtures by these names.
folder = command_runs.folder
run_command = command_runs.run_command


def write_run(
    folder: Any,
    *,
    silent_s: float = 0.0,
    code: int | None = None,
    owner: Owner | None = None,
) -> None:
    """Write a run of 100 steps whose second start trained from step 20 to 60."""
    folder = epath.Path(folder)
    files = {
        "config.yaml": CONFIG,
        "starts/1.yaml": "host: a\nchanges: {}\n",
        "starts/2.yaml": "host: b\nchanges: {train.num_steps: 100}\n",
        "checkpoints/20/digests.json": "{}",
        "checkpoints/60/state": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if owner:
        (folder / "lease.json").write_bytes(owner.to_json())
    now = time.monotonic() - silent_s
    log = EventLog(folder, began=now - 200)
    log.lap("prepare", until=now - 190)
    log.lap("restore", until=now - 190, step=0)
    log.lap("step", until=now - 150, steps=40, step=40)
    if log._lines:
        log._lines.close()  # killed
    log = EventLog(folder, began=now - 100)
    log.lap("start", until=now - 90)
    log.lap("restore", until=now - 80, step=20)
    log.lap("step", {"data_wait": 20.0}, until=now, steps=40, step=60)
    if code is not None:
        log.end(code)
        log.close()
    elif log._lines:
        log._lines.close()
    metrics = open_metrics(folder, 0)
    for step in (20, 40, 60):
        metrics.append({"step": step, "loss": 100.0 - step})
    for step, loss in ((20, 2.0), (40, 0.5), (60, 1.0)):
        bits = {"eval/bits_per_byte": 2 * loss}
        metrics.append({"step": step, "eval/loss": loss, **bits})
    metrics.close()


@pytest.mark.parametrize(
    ("silent_s", "code", "state"),
    [
        (1.0, None, "running"),
        (9000.0, None, "stopped: unknown, left no exit code"),
        (1.0, 42, "stopped: preempted"),
        (1.0, 1, "stopped: crashed, exit code 1"),
    ],
)
def test_the_state_of_a_run(tmp_path, silent_s, code, state):
    owner = OWNER if state == "running" else None
    write_run(tmp_path, silent_s=silent_s, code=code, owner=owner)
    status = read_status(epath.Path(tmp_path))
    assert status.state == state
    assert status.owner == (owner and str(owner))
    assert (status.step, status.num_steps, status.loss) == (60, 100, 40.0)
    assert status.silent_s is not None
    if code is None:
        assert silent_s <= status.silent_s < silent_s + 60
    # 40 steps took 80 s without the restore.
    left_s = pytest.approx(80.0) if state == "running" else None
    assert status.left_s == left_s
    assert status.save is not None
    assert (status.save.step, status.save.sealed) == (60, False)


def test_a_finished_run_is_finished_until_more_steps_are_configured(tmp_path):
    write_run(tmp_path, code=0)
    (tmp_path / "results.json").write_text('{"step": 100}')
    assert read_status(epath.Path(tmp_path)).state == "finished"
    (tmp_path / "starts" / "3.yaml").write_text("changes: {train.num_steps: 200}\n")
    assert read_status(epath.Path(tmp_path)).state == "stopped: finished"


@pytest.mark.parametrize(
    ("then", "owned"), [("beats", True), ("ends", False), ("is dead", False)]
)
def test_the_lease_shows_whether_an_owner_on_another_machine_is_alive(
    tmp_path, monkeypatch, then, owned
):
    """The owner may compile, for example, and then beat again or remove its lease."""
    remote_owner = replace(OWNER, machine="another", host="far")
    write_run(tmp_path, silent_s=9000.0, code=42, owner=remote_owner)
    lease = tmp_path / "lease.json"
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2 and then == "beats":
            lease.write_bytes(replace(remote_owner, beat=1).to_json())
        elif len(waits) == 2 and then == "ends":
            lease.unlink()

    monkeypatch.setattr(
        status_module, "time", SimpleNamespace(sleep=wait, time=time.time)
    )
    status = read_status(epath.Path(tmp_path))
    assert status.owner == (str(remote_owner) if owned else None)
    assert status.state == ("running" if owned else "stopped: preempted")
    assert len(waits) == (10 if then == "is dead" else 2)


def test_a_run_that_recorded_nothing(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    status = read_status(epath.Path(tmp_path))
    assert status.state == "stopped: before it recorded anything"
    assert (status.step, status.num_steps) == (0, 80)


def test_the_command_prints_the_status_as_text_and_as_json(tmp_path, capsys):
    write_run(tmp_path, owner=OWNER)
    (tmp_path / "checkpoints" / "60" / "digests.json").write_text("{}")
    run = RunConfig(dir=str(tmp_path))
    assert main(StatusConfig(run)) == 0
    output = capsys.readouterr().out
    for line in (
        f"state       running, {OWNER}, last record",
        *("step        60 of 100, 1 min 20 s", "loss        40.0000"),
        "validation  1.0000 nats a token, 2.0000 bits per byte at step 60",
        "best        0.5000 nats a token, 1.0000 bits per byte at step 40",
        *("last save   step 60, ", "goodput     40.0% of 3 min 20 s in 2 starts, "),
    ):
        assert line in output
    starts = [x for x in output.splitlines() if x.strip()[:2] in ("1 ", "2 ")]
    end_states = [start.rpartition("  ")[2] for start in starts]
    assert end_states == ["unknown, left no exit code", "running"]
    assert main(StatusConfig(run, json=True)) == 0
    status = json.loads(capsys.readouterr().out)
    values = [status[name] for name in ("state", "owner", "step")]
    assert values == ["running", str(OWNER), 60]
    assert status["save"]["sealed"]
    assert status["validation"] == {
        "last": {"step": 60, "loss": 1.0, "bits_per_byte": 2.0},
        "best": {"step": 40, "loss": 0.5, "bits_per_byte": 1.0},
    }
    assert status["goodput"]["buckets"]["wasted"] == pytest.approx(20.0)


def test_a_run_is_followed_until_it_has_no_owner(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, owner=OWNER)
    monkeypatch.setattr(status_module, "_FOLLOW_S", 0.0)
    statuses = [read_status(epath.Path(tmp_path))] * 3
    statuses.append(replace(statuses[0], state="stopped: preempted", owner=None))
    monkeypatch.setattr(status_module, "read_status", lambda folder: statuses.pop(0))
    assert main(StatusConfig(RunConfig(dir=str(tmp_path)), follow=True)) == 0
    assert statuses == []
    out = capsys.readouterr().out
    assert out.count("state ") == 1
    assert "stopped: preempted" in out


def test_no_run_is_a_mistake_of_the_command_line(run_command, tmp_path):
    result = run_command(tmp_path, module="train.status", config=())
    assert result.returncode == 78
    assert f"run.dir = {tmp_path}" in result.stderr
    rule = "must name the directory of a run; there is no"
    assert f"{rule} {tmp_path}/config.yaml" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_run_in_a_store(server):
    run = "s3://bucket/runs/far"
    write_run(run, owner=OWNER)
    status = read_status(epath.Path(run))
    assert (status.state, status.step, status.loss) == ("running", 60, 40.0)
    result = subprocess.run(
        [sys.executable, *module_option("train.status"), f"run.dir={run}", "json=true"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["owner"] == str(OWNER)
