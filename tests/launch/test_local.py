"""`cluster=local`, through the door, with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.config import LocalCluster
from launch.job import Job, control_character_mistakes
from launch.local import _Attempt, render, stop
from launch.submissions import Submission
from tests.drills.ground import check_equal
from tests.launch.hostile import VALUES, argument_printer, printed, program
from tests.launch.launched import STEPS, TIMEOUT_S, LaunchedRun, launch, says
from tests.launch.remote.stage import until
from train.cli.quoting import hydra_text
from train.run.liveness import Process

COUNT = 4


def local(folder: Path, *more: str) -> LaunchedRun:
    return LaunchedRun(folder, "cluster=local", f"cluster.processes={COUNT}", *more)


@pytest.mark.slow
def test_killed_preempted_stopped_and_resumed(tmp_path):
    """The curve and the arrays are those of the run that nothing disturbed."""
    run = local(tmp_path / "x", "cluster.detach=true")
    run.submit()
    run.await_steps()

    os.kill(run.processes()[2], signal.SIGKILL)  # one dies: all are started again
    run.await_attempts(1)
    run.await_steps()
    os.kill(run.processes()[1], signal.SIGTERM)  # one is preempted
    run.await_attempts(2)
    run.await_steps()

    status = run.verb("status")
    for said in ("\nkept running by process", "attempt 1", "137", "attempt 2"):
        assert said in status
    assert "42, 42, 42, 42: again" in status
    again = run.says(*run.arguments, code=78)
    assert "runs, or waits to run, on local" in again
    assert "step" in run.verb("logs")

    run.verb("stop")
    assert not run.processes()
    stopped = run.run.step
    assert run.run.sealed()[-1] == stopped < STEPS
    assert "\nnot kept running" in run.verb("status")

    other = tmp_path / "elsewhere"
    other.mkdir()
    only = f"run.dir={run.run.path}"
    says(other, "action=resume", only)
    said = says(other, "action=logs", "follow=true", only)  # until it ends
    assert f"from step {stopped}\n" in said
    check_equal(run.run, run.straight(COUNT), STEPS)
    kept = {file.name for file in run.submission(2).iterdir()}
    assert {"record.json", "config.yaml", "local.sh", "process-3.log"} <= kept


@pytest.mark.slow
def test_ctrl_c_saves_and_ends(tmp_path):
    run = local(tmp_path)
    process = launch(tmp_path, *run.arguments, "cluster.processes=1")
    run.await_steps()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 130, said
    assert f"saved step {run.run.step}" in said
    assert not run.processes()


SAVES = """#!/usr/bin/env bash
trap 'echo saved; exit 130' INT
echo trains
for _ in {1..12000}; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [1, 2], ids=["as-it-is", "resumed-since"])
def test_stop_ends_what_outlived_its_supervisor(tmp_path, monkeypatch, caplog, number):
    """After kill -9 of the supervisor of submission 1 its processes live on."""
    program(tmp_path / "python", SAVES)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with subprocess.Popen(["sleep", "600"]) as supervisor:
        handle = asdict(Process.of(supervisor.pid))
        supervisor.kill()
    run = f"{tmp_path}/run"
    folder = Submission(run, 1, "local", "base", (), "").local_folder()
    _Attempt(job(tmp_path, []), LocalCluster(processes=2), folder, show=False)
    files = [folder / "process-0.log", folder / "process-1.log"]
    until(lambda: all(file.read_text() for file in files))
    submission = Submission(run, number, "local", "base", (), "", handle=handle)
    submission.local_folder()
    assert stop(submission) == 0
    assert [file.read_text() for file in files] == ["trains\nsaved\n"] * 2
    assert not caplog.text
    stop(submission)
    assert "nothing of it runs on this machine; it was started on" in caplog.text


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
    overrides = [hydra_text("tracker.wandb.project", value) for value in VALUES]
    rendered = render(job(tmp_path, overrides), LocalCluster(processes=processes))
    (tmp_path / "local.sh").write_text(rendered.files["local.sh"])
    subprocess.run(rendered.command, cwd=tmp_path, check=True)
    wanted = ["-P", "-m", "train", *overrides]
    assert printed(tmp_path) == [wanted] * processes


def test_what_ends_a_line_is_refused():
    refused = [value for value in VALUES if control_character_mistakes([value])]
    assert refused == ["\ta", "two\nlines", "bell\a", "\r"]
