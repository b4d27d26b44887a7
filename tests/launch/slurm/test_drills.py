"""`cluster=slurm`, through the door, with a Slurm of two nodes on this machine."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.drills.ground import check_equal
from tests.drills.run import Run
from tests.fleet import TINY
from tests.launch.test_local import says

pytestmark = pytest.mark.slow

STEPS = 600
LONG = ("train.num_steps=1000000", "checkpoint.save_interval_steps=1000")
TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def found(slurm, monkeypatch) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)


class Training:
    """A run of two processes, as its launcher's user sees it."""

    def __init__(self, folder: Path, name: str = "base"):
        folder.mkdir(exist_ok=True)
        source = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
        (folder / "text.txt").write_text(source)
        self.folder, self.run = folder, Run(folder / f"runs/{name}", (), {})
        self.keys = (
            *(*TINY, "data.path=text.txt", "data.cache_dir=cache"),
            *(f"train.num_steps={STEPS}", f"run.name={name}", "mesh=ddp"),
            *("checkpoint.save_interval_steps=20", "distributed.heartbeat_timeout_s=5"),
        )
        self.submit = ("cluster=slurm", "cluster.nodes=2", *self.keys)
        self.only = f"run.name={name}"
        self.job = ""

    def says(self, *arguments: str, code: int = 0) -> str:
        return says(self.folder, *arguments, code=code)

    def start(self, *more: str) -> None:
        said = self.says(*self.submit, *more)
        found = re.search(r"^job (\d+);", said, re.MULTILINE)
        assert found, said
        self.job = found[1]

    def await_that(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def await_steps(self, more: int = 4) -> None:
        first = self.run.step
        self.await_that(lambda: self.run.step >= first + more)

    def await_attempts(self, number: int) -> dict[str, Any]:
        """Give the last of so many, once they have ended."""
        file = self.run.path / "launch/1/attempts.jsonl"
        self.await_that(
            lambda: file.exists() and file.read_text().count("\n") >= number
        )
        return json.loads(file.read_text().splitlines()[number - 1])

    def log(self) -> str:
        return (self.run.path / "launch/1/job.log").read_text(errors="replace")

    def process(self, rank: int) -> int:
        """Find a process that trains."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            here = f'run.dir="{self.run.path}"' in words and words[3:4] == ["train"]
            if here and f"SLURM_PROCID={rank}" in variables:
                return int(entry.name)
        raise AssertionError(self.log())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing disturbed: processes of this machine, no Slurm."""
    training = Training(tmp_path_factory.mktemp("straight"))
    said = training.says("cluster=local", "cluster.processes=2", *training.keys)
    assert f"finished    {STEPS} steps" in said
    return training.run


def test_killed_requeued_stopped_and_resumed(straight, tmp_path):
    """The curve and the arrays are those of the run that nothing disturbed."""
    training = Training(tmp_path / "100 %j's")
    training.start("cluster.backoff_s=1")
    training.await_steps()

    os.kill(training.process(1), signal.SIGKILL)
    first = training.await_attempts(1)
    assert (first["verdict"], first["codes"]) == ("crashed", [134, 137])
    assert first["step"] >= 4
    training.await_steps()
    subprocess.run(["scontrol", "requeue", training.job], check=True)
    second = training.await_attempts(2)
    assert (second["verdict"], second["codes"]) == ("again", [42, 42])
    training.await_steps()

    training.says("action=stop", training.only)
    stopped = training.run.step
    assert training.run.sealed()[-1] == stopped < STEPS
    third = training.await_attempts(3)
    assert (third["codes"], third["over"]) == ([130, 130], True)
    status = training.says("action=status", training.only)
    for said in (f"job {training.job}: failed", "restarts    2", "137: again"):
        assert said in status
    assert "crashed with 137 (1 of 10)" in training.says("action=logs", training.only)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = f'run.dir="{training.run.path}"'
    says(elsewhere, "action=resume", run)
    said = says(elsewhere, "action=logs", "follow=true", run)
    assert f"from step {stopped}\n" in said
    check_equal(training.run, straight, STEPS)


def test_who_waits_is_told_why(tmp_path):
    training = Training(tmp_path)
    training.start(*LONG)
    training.await_steps()
    status = training.says("action=status", training.only)
    assert f"job {training.job}: running" in status
    assert "runs, or waits to run, on slurm" in training.says(*training.submit, code=78)

    other = Training(tmp_path, "other")
    other.start()
    status = other.says("action=status", other.only)
    assert f"job {other.job}: pending, waits: Resources" in status
    assert "no jobs before it in debug" in status
    other.says("action=stop", other.only)
    status = other.says("action=status", other.only)
    assert f"job {other.job}: cancelled" in status
    training.says("action=stop", training.only)
    assert training.run.sealed()[-1] == training.run.step


def test_a_time_limit(tmp_path):
    """Slurm warns ahead, up to a minute early; the run saves, and waits for more."""
    training = Training(tmp_path)
    training.start("cluster.time=2", "cluster.signal_s=30", *LONG)
    first = training.await_attempts(1)
    assert (first["verdict"], first["codes"]) == ("again", [42, 42])
    assert first["ended"] - first["began"] < 120
    assert training.run.sealed()[-1] == training.run.step
    assert "saved step" in training.log()
    status = training.says("action=status", training.only)
    assert re.search("pending, waits: BeginTime|running|completing", status), status
    training.says("action=stop", training.only)
    status = training.says("action=status", training.only)
    assert re.search("cancelled|failed", status), status  # it may have begun again


def test_what_another_start_would_not_mend_is_not_started_again(tmp_path):
    training = Training(tmp_path)
    training.start("data.path=gone.txt", "cluster.code=archive")
    said = training.says("action=logs", "follow=true", training.only)
    assert "code: " in said  # unpacked
    assert "gone.txt" in said
    ended = training.await_attempts(1)
    assert (set(ended["codes"]), ended["over"]) == ({65}, True)
    status = training.says("action=status", training.only)
    assert f"job {training.job}: failed" in status


def test_what_slurm_refuses(tmp_path):
    training = Training(tmp_path)
    said = training.says(*training.submit, "cluster.partition=nosuch", code=1)
    assert "sbatch: " in said
    assert "invalid partition" in said
    status = training.says("action=status", training.only)
    assert "sbatch did not take it" in status
