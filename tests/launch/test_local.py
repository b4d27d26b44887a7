"""`cluster=local`, through the door, with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from launch.config import LocalCluster
from launch.job import Job, control_character_mistakes
from launch.local import render
from tests.drills.ground import check_equal
from tests.drills.run import Run
from tests.fleet import REPOSITORY, TINY
from tests.launch.golden import equals_golden
from tests.launch.hostile import VALUES, argument_printer, printed
from train.cli.quoting import hydra_text

COUNT, STEPS = 4, 600
TIMEOUT_S = 300


def launch(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        env=env,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def says(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run a verb to its end, and give what it said."""
    process = launch(folder, *arguments)
    said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == code, said
    return said


class Training:
    """A run of several processes, as its launcher's user sees it."""

    def __init__(self, folder: Path, name: str):
        source = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
        (folder / "text.txt").write_text(source)
        self.folder, self.run = folder, Run(folder / f"runs/{name}", (), {})
        self.submit = (
            *("cluster=local", f"cluster.processes={COUNT}", "cluster.backoff_s=0.1"),
            *(*TINY, "data.path=text.txt", f"data.cache_dir={folder}/cache"),
            *(f"train.num_steps={STEPS}", f"run.name={name}", "mesh=ddp"),
            *("checkpoint.save_interval_steps=20", "distributed.heartbeat_timeout_s=5"),
        )
        self.only = f"run.name={name}"

    def await_that(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def await_steps(self, more: int = 4) -> None:
        first = self.run.step
        self.await_that(lambda: self.run.step >= first + more)

    def processes(self) -> dict[int, int]:
        """Give the processes that train, by their rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "train" in words and f'run.dir="{self.run.path}"' in words:
                rank = next((v for v in variables if v.startswith("RANK=")), "RANK=0")
                found[int(rank.removeprefix("RANK="))] = int(entry.name)
        return found

    def submission(self, number: int) -> Path:
        return self.run.path / f"launch/{number}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing disturbed."""
    training = Training(tmp_path_factory.mktemp("straight"), "base")
    said = says(training.folder, *training.submit)
    assert f"finished    {STEPS} steps" in said
    return training.run


@pytest.mark.slow
def test_killed_preempted_stopped_and_resumed(straight, tmp_path):
    """The curve and the arrays are those of the run that nothing disturbed."""
    training = Training(tmp_path, "base")
    says(tmp_path, *training.submit, "cluster.detach=true")
    training.await_steps()

    os.kill(training.processes()[2], signal.SIGKILL)  # one dies: all are started again
    training.await_that(lambda: (training.submission(1) / "attempts.jsonl").exists())
    training.await_steps()
    os.kill(training.processes()[1], signal.SIGTERM)  # one is preempted
    training.await_that(
        lambda: (training.submission(1) / "attempts.jsonl").read_text().count("\n") == 2
    )
    training.await_steps()

    status = says(tmp_path, "action=status", training.only)
    assert "\nrunning: process" in status
    assert "attempt 1" in status
    assert "137" in status
    assert "attempt 2" in status
    assert "42, 42, 42, 42: again" in status
    again = says(tmp_path, *training.submit, code=78)
    assert "runs, or waits to run, on local" in again
    assert "step" in says(tmp_path, "action=logs", training.only)

    says(tmp_path, "action=stop", training.only)
    assert not training.processes()
    stopped = training.run.step
    assert training.run.sealed()[-1] == stopped < STEPS
    assert "\nnot running" in says(tmp_path, "action=status", training.only)

    other = tmp_path / "elsewhere"
    other.mkdir()
    only = f"run.dir={training.run.path}"
    says(other, "action=resume", only)
    said = says(other, "action=logs", "follow=true", only)  # until it ends
    assert f"from step {stopped}\n" in said
    check_equal(training.run, straight, STEPS)
    kept = {file.name for file in training.submission(2).iterdir()}
    assert {"record.json", "config.yaml", "local.sh", "process-3.log"} <= kept


@pytest.mark.slow
def test_ctrl_c_saves_and_ends(tmp_path):
    training = Training(tmp_path, "base")
    process = launch(tmp_path, *training.submit, "cluster.processes=1")
    training.await_steps()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 130, said
    assert f"saved step {training.run.step}" in said
    assert not training.processes()


@pytest.mark.slow
def test_what_another_start_would_not_mend_is_not_started_again(tmp_path):
    training = Training(tmp_path, "base")
    said = says(tmp_path, *training.submit, "data.path=gone.txt", code=65)
    assert "gone.txt" in said
    attempts = (training.submission(1) / "attempts.jsonl").read_text()
    assert attempts.count("\n") == 1


def test_verbs_need_a_run(tmp_path):
    said = says(tmp_path, "action=logs", "run.name=nothing", code=78)
    assert "was never submitted" in said
    assert not list(tmp_path.iterdir())


def test_mistakes_of_cluster_and_training_come_together(tmp_path):
    said = says(
        tmp_path,
        *("cluster.processes=0", "cluster.environment={WANDB_API_KEY: very-secret}"),
        *("train.num_steps=-1", "cluster.nodes=2", "follow=true"),
        code=78,
    )
    assert "4 mistakes" in said or "5 mistakes" in said
    for word in ("cluster.processes", "WANDB_API_KEY", "train.num_steps", "nodes"):
        assert word in said
    assert "very-secret" not in said


def job(folder: Path, overrides: Sequence[str]) -> Job:
    where = {"run_dir": str(folder / "runs/a b$(x)"), "folder": str(folder)}
    own = {"root": str(folder), "workdir": str(folder)}
    return Job(name="base", overrides=tuple(overrides), **where, **own)


@pytest.mark.parametrize("processes", [1, 3])
def test_hostile_values_arrive_verbatim(tmp_path, monkeypatch, processes):
    python = argument_printer(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    overrides = [hydra_text("tracker.project", value) for value in VALUES]
    rendered = render(job(tmp_path, overrides), LocalCluster(processes=processes))
    (tmp_path / "local.sh").write_text(rendered.files["local.sh"])
    subprocess.run(rendered.command, cwd=tmp_path, check=True)
    wanted = ["-P", "-m", "train", *overrides]
    assert printed(tmp_path) == [wanted] * processes


def test_what_ends_a_line_is_refused():
    refused = [value for value in VALUES if control_character_mistakes([value])]
    assert refused == ["\ta", "two\nlines", "bell\a", "\r"]


@pytest.mark.parametrize("processes", [1, 2])
def test_rendered_as_in_the_golden_files(monkeypatch, processes):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    golden = Job(
        *("base-12345678", "/runs/base", ".", ("model=gpt_nano",), "/code", "/work"),
        environment={"NCCL_DEBUG": "a $b"},
    )
    rendered = render(golden, LocalCluster(processes=processes))
    equals_golden(f"local/{processes}", rendered)
