"""`cluster=local` as a user types it, with real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.config import LocalCluster
from launch.job import Job, control_character_mistakes
from launch.local import _Attempt, render, stop
from launch.submissions import Submission
from tests.drills.ground import check_equal
from tests.launch.hostile import VALUES, argument_printer, printed, program
from tests.launch.launched import STEPS, TIMEOUT_S, LaunchedRun, launch, says
from tests.launch.remote.stage import until
from tests.program import module_option
from train.cli.quoting import hydra_text
from train.liveness import Process

COUNT = 4


def local_run(folder: Path, *more: str) -> LaunchedRun:
    return LaunchedRun(folder, "cluster=local", f"cluster.processes={COUNT}", *more)


@pytest.mark.slow
def test_killed_preempted_stopped_and_resumed(tmp_path):
    """The curve and the arrays equal those of an undisturbed run."""
    run = local_run(tmp_path / "x", "cluster.detach=true")
    run.submit()
    run.await_steps()

    os.kill(run.processes()[2], signal.SIGKILL)  # one dies, and all start again
    run.await_attempts(1)
    run.await_steps()
    os.kill(run.processes()[1], signal.SIGTERM)  # one is preempted
    run.await_attempts(2)
    run.await_steps()

    status = run.verb("status")
    for text in ("\nkept running by process", "attempt 1", "137", "attempt 2"):
        assert text in status
    assert "42, 42, 42, 42: again" in status
    refusal = run.says(run.arguments, code=78)
    assert "runs, or waits to run, on local" in refusal
    assert "step" in run.verb("logs")

    run.verb("stop")
    assert not run.processes()
    stop_step = run.run.step
    assert run.run.sealed()[-1] == stop_step < STEPS
    assert "\nnot kept running" in run.verb("status")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    only = f"run.dir={run.run.path}"
    says(elsewhere, ["action=resume", only])
    text = says(elsewhere, ["action=logs", "follow=true", only])  # until it ends
    assert f"from step {stop_step}\n" in text
    check_equal(run.run, run.straight(COUNT), STEPS)
    files = {file.name for file in run.submission(2).iterdir()}
    assert {"record.json", "config.yaml", "local.sh", "process-3.log"} <= files


@pytest.mark.slow
def test_ctrl_c_saves_and_ends(tmp_path):
    run = local_run(tmp_path)
    process = launch(tmp_path, [*run.arguments, "cluster.processes=1"])
    run.await_steps()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 130, output
    assert f"saved step {run.run.step}" in output
    assert not run.processes()


@pytest.mark.slow
def test_programs_read_one_object_from_each_action(tmp_path):
    run = LaunchedRun(tmp_path, "cluster=local", num_steps=30)

    def read(*arguments: str) -> dict[str, Any]:
        words = [*arguments, "json=true"]
        process = launch(tmp_path, words, stderr=subprocess.DEVNULL)
        return json.loads(process.communicate(timeout=TIMEOUT_S)[0])

    values = read(*run.arguments)
    assert (values["kind"], values["exit_code"]) == ("local", 0)
    assert values["files"].keys() == {"local.sh"}
    assert not Process.from_dict(values["handle"]).alive()
    status = read("action=status", run.only)
    assert (status["alive"], status["run"]["state"]) == (False, "finished")
    assert status["run"]["step"] == 30
    detached = ("cluster=local", "cluster.detach=true")
    other = LaunchedRun(tmp_path, *detached, name="other", num_steps=10**6)
    assert read(*other.arguments)["exit_code"] == 0
    other.await_steps()
    assert read("action=status", other.only)["alive"]
    assert read("action=stop", other.only)["exit_code"] == 0
    status = read("action=status", other.only)
    assert (status["alive"], status["run_name"]) == (False, "other")
    assert status["run"]["state"].startswith("stopped")


SAVES = """#!/usr/bin/env bash
trap 'echo saved; exit 130' INT
echo trains
for _ in {1..12000}; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [1, 2], ids=["as-it-is", "resumed-since"])
def test_stop_ends_processes_that_outlived_their_supervisor(
    tmp_path, monkeypatch, caplog, number
):
    """The processes of submission 1 survive a kill -9 of their supervisor."""
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
    output = says(tmp_path, ["action=logs", "run.name=nothing"], code=78)
    assert "was never submitted" in output
    assert not list(tmp_path.iterdir())


def test_mistakes_of_cluster_and_training_come_together(tmp_path):
    output = says(
        tmp_path,
        [
            "cluster.processes=0",
            "cluster.environment={WANDB_API_KEY: very-secret}",
            "train.num_steps=-1",
            "cluster.nodes=2",
            "follow=true",
        ],
        code=78,
    )
    assert "4 mistakes" in output or "5 mistakes" in output
    for word in ("cluster.processes", "WANDB_API_KEY", "train.num_steps", "nodes"):
        assert word in output
    assert "very-secret" not in output


def job(folder: Path, overrides: Sequence[str]) -> Job:
    run_paths = {"run_dir": str(folder / "runs/a b$(x)"), "folder": str(folder)}
    code_paths = {"root": str(folder), "workdir": str(folder)}
    return Job(name="base", overrides=tuple(overrides), **run_paths, **code_paths)


@pytest.mark.parametrize("processes", [1, 3])
def test_hostile_values_arrive_verbatim(tmp_path, monkeypatch, processes):
    python = argument_printer(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    overrides = [hydra_text("tracker.wandb.project", value) for value in VALUES]
    rendered = render(job(tmp_path, overrides), LocalCluster(processes=processes))
    (tmp_path / "local.sh").write_text(rendered.files["local.sh"])
    subprocess.run(rendered.command, cwd=tmp_path, check=True)
    expected = ["-P", *module_option("train"), *overrides]
    assert printed(tmp_path) == [expected] * processes


def test_control_characters_are_refused():
    refused = [value for value in VALUES if control_character_mistakes([value])]
    assert refused == ["\ta", "two\nlines", "bell\a", "\r"]
