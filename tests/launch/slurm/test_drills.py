"""`cluster=slurm` as a user types it, with a Slurm of two nodes on this machine."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drills.ground import check_equal
from tests.launch.launched import STEPS, LaunchedRun, says

pytestmark = pytest.mark.slow

LONG = ("train.num_steps=1000000", "checkpoint.save_interval_steps=1000")


@pytest.fixture(autouse=True)
def found(slurm, monkeypatch) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)


class SlurmRun(LaunchedRun):
    """A run of two processes, as its launcher's user sees it."""

    def __init__(self, folder: Path, name: str = "base"):
        super().__init__(folder, "cluster=slurm", "cluster.nodes=2", name=name)
        # Paths that need no quotes replace the last two arguments.
        count = len(self.arguments) - 2
        self.arguments = (*self.arguments[:count], "data.path=text.txt")
        self.arguments += ("data.cache_dir=cache",)
        self.job = ""

    def submit(self, overrides: Sequence[str] = ()) -> str:
        output = super().submit(overrides)
        number = re.search(r"^job (\d+);", output, re.MULTILINE)
        assert number, output
        self.job = number[1]
        return output


def test_killed_requeued_stopped_and_resumed(tmp_path):
    """The curve and the arrays equal those of an undisturbed run."""
    training = SlurmRun(tmp_path / "100 %j's")
    training.submit()
    training.await_steps()

    os.kill(training.processes("SLURM_PROCID")[1], signal.SIGKILL)
    first = training.await_attempts(1)
    assert (first["verdict"], first["codes"]) == ("crashed", [134, 137])
    assert first["step"] >= 4
    training.await_steps()
    subprocess.run(["scontrol", "requeue", training.job], check=True)
    second = training.await_attempts(2)
    assert (second["verdict"], second["codes"]) == ("again", [42, 42])
    training.await_steps()

    training.verb("stop")
    stop_step = training.run.step
    assert training.run.sealed()[-1] == stop_step < STEPS
    third = training.await_attempts(3)
    assert (third["codes"], third["over"]) == ([130, 130], True)
    status = training.verb("status")
    for text in (f"job {training.job}: failed", "restarts    2", "137: again"):
        assert text in status
    assert "crashed with 137 (1 of 10)" in training.verb("logs")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = f'run.dir="{training.run.path}"'
    says(elsewhere, ["action=resume", run])
    text = says(elsewhere, ["action=logs", "follow=true", run])
    assert f"from step {stop_step}\n" in text
    check_equal(training.run, training.straight(2), STEPS)


def test_status_says_why_a_job_waits(tmp_path):
    training = SlurmRun(tmp_path)
    training.submit(LONG)
    training.await_steps()
    status = training.verb("status")
    assert f"job {training.job}: running" in status
    assert "runs, or waits to run, on slurm" in training.says(
        training.arguments, code=78
    )

    queued = SlurmRun(tmp_path, "other")
    queued.submit()
    status = queued.verb("status")
    assert f"job {queued.job}: pending, waits: Resources" in status
    queued.verb("stop")
    status = queued.verb("status")
    assert f"job {queued.job}: cancelled" in status
    training.verb("stop")
    assert training.run.sealed()[-1] == training.run.step


def test_a_run_saves_before_its_time_limit_and_is_requeued(tmp_path):
    """Slurm warns up to a minute early; the run saves, and waits in the queue."""
    training = SlurmRun(tmp_path)
    training.submit(["cluster.time=2", "cluster.signal_s=30", *LONG])
    first = training.await_attempts(1)
    assert (first["verdict"], first["codes"]) == ("again", [42, 42])
    assert first["ended"] - first["began"] < 120
    assert training.run.sealed()[-1] == training.run.step
    assert "saved step" in training.logs()
    status = training.verb("status")
    assert re.search("pending, waits: BeginTime|running|completing", status), status
    training.verb("stop")
    status = training.verb("status")
    assert re.search("cancelled|failed", status), status  # it may have started again


# It ignores SIGTERM, like a save that takes too long; its next start ends at once.
TOO_LONG = """#!/bin/sh
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
trap '' TERM
exec sleep 3600
"""


def test_a_run_killed_at_its_time_limit_during_a_save_is_requeued(tmp_path):
    """Slurm kills the whole job with its script, which has requeued it by then."""
    training = SlurmRun(tmp_path)
    python = tmp_path / "python"
    python.write_text(TOO_LONG)
    python.chmod(0o755)
    training.submit(["cluster.time=1", f"cluster.python={python}"])
    assert "in the queue again" in training.verb("logs", "follow=true")
    attempt = training.await_attempts(1)
    assert (attempt["verdict"], attempt["codes"]) == ("done", [0, 0])
    assert "restarts    1" in training.verb("status")


def test_cancelled_for_a_job_of_a_higher_priority(tmp_path):
    training = SlurmRun(tmp_path)
    training.submit(LONG)
    training.await_steps()
    subprocess.run(["srun", "--partition=urgent", "--nodes=2", "true"], check=True)
    first = training.await_attempts(1)
    assert (first["verdict"], first["codes"]) == ("again", [42, 42])
    training.await_steps()
    training.verb("stop")
    assert "restarts    1" in training.verb("status")


def test_a_failure_that_a_restart_cannot_mend_is_final(tmp_path):
    training = SlurmRun(tmp_path)
    training.submit(["data.path=gone.txt", "cluster.code=archive"])
    logs = training.verb("logs", "follow=true")
    assert "code: " in logs  # the archive was unpacked
    assert "gone.txt" in logs
    attempt = training.await_attempts(1)
    assert (set(attempt["codes"]), attempt["over"]) == ({65}, True)
    status = training.verb("status")
    assert f"job {training.job}: failed" in status


def test_a_refusal_by_slurm_is_shown(tmp_path):
    training = SlurmRun(tmp_path)
    output = training.says([*training.arguments, "cluster.partition=nosuch"], code=1)
    assert "sbatch: " in output
    assert "invalid partition" in output
    status = training.verb("status")
    assert "sbatch did not take it" in status
