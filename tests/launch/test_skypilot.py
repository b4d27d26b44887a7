"""`cluster=skypilot`: the task, what its shell starts, and the verbs."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import skypilot
from launch.config import SkypilotCluster
from launch.config.clusters import Code
from launch.job import Job, start_words
from launch.job_secret import SECRET_VARIABLE
from launch.node import STOP
from launch.policy import Verdict, judge
from launch.skypilot import FILE
from launch.submissions import Submission
from tests.launch.hostile import VALUES, argument_printer, printed, program
from tests.launch.kinds import GOLDEN, JOB
from train.cli.quoting import hydra_text
from train.errors import Exit

PLAIN = SkypilotCluster(accelerators="H100:8")
FULL = GOLDEN["skypilot/full"]


def task(cluster: SkypilotCluster, job: Job = JOB) -> dict[str, Any]:
    return yaml.safe_load(skypilot.render(job, cluster).files[FILE])


def test_skypilot_restarts_the_codes_that_the_policy_restarts():
    """A crash that may restart ends with 134, as tests/launch/test_node.py shows."""
    recovery = task(PLAIN)["resources"]["job_recovery"]
    assert recovery["max_restarts_on_errors"] == 0
    restart_codes = recovery["recover_on_exit_codes"]
    for code in range(256):
        verdict = judge([code])[0]
        if verdict is not Verdict.crashed:
            assert (code in restart_codes) == (verdict is Verdict.again), code


@pytest.mark.parametrize("code", [Code.archive, Code.image])
@pytest.mark.parametrize("shell", [["bash"], ["bash", "-i"]])
def test_hostile_values_arrive(code, shell, tmp_path):
    """Each value is one argument of training; SkyPilot's shell is interactive."""
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    cluster = replace(PLAIN, code=code)
    script = task(cluster, replace(JOB, overrides=overrides))["run"]
    argument_printer(tmp_path, "python3")
    (tmp_path / "script.sh").write_text(script)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_RANK": "0"}
    result = subprocess.run(
        [*shell, "script.sh"],
        env={**env, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        start_new_session=True,
    )
    assert result.returncode == 0, result.stderr
    (arguments,) = printed(tmp_path)
    assert tuple(arguments[-len(overrides) :]) == overrides
    start = start_words("train", "python", code)[1:]
    assert arguments[: -len(overrides)][-len(start) :] == start
    assert (arguments[0] == "./unpack.py") == (code is Code.archive)


FAKE = """#!{python}
import json, os, sys
here = {folder!r}
calls = open(here + "/calls.jsonl", "a")
calls.write(json.dumps([sys.argv[1:], os.environ.get("WANDB_API_KEY")]) + "\\n")
calls.close()
queue = json.load(open(here + "/queue.json"))
words = sys.argv[1:]
if words[:2] == ["jobs", "queue"]:
    assert words[2:] == ["--all", "--output", "json"], words
    print("Checking managed jobs ...")
    print(json.dumps(queue))
elif words[:2] == ["jobs", "logs"]:
    print("step 7")
    sys.exit(100)
elif words[:2] == ["jobs", "cancel"]:
    for job in queue:
        job["status"] = "CANCELLED"
    json.dump(queue, open(here + "/queue.json", "w"))
elif words[:2] == ["jobs", "launch"]:
    print("launching")
else:
    sys.exit("no such command")
"""


class Sky:
    def __init__(self, folder: Path):
        self.folder = folder
        self.tell()
        text = FAKE.format(python=sys.executable, folder=str(folder))
        program(folder / "sky", text)

    def tell(self, *jobs: dict[str, Any]) -> None:
        new = self.folder / "queue.new"
        new.write_text(json.dumps(jobs))
        new.replace(self.folder / "queue.json")

    def calls(self) -> list[list[Any]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def sky(tmp_path, monkeypatch) -> Iterator[Sky]:
    monkeypatch.setattr(skypilot, "_POLL_S", 0.05)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Sky(tmp_path)


@pytest.fixture
def submission(tmp_path) -> Submission:
    submission = Submission(str(tmp_path / "run"), 1, "skypilot", JOB.name, (), "/here")
    submission.folder.mkdir(parents=True)
    return submission


def job(status: str, number: int = 3, **more: Any) -> dict[str, Any]:
    return {"job_id": number, "job_name": JOB.name, "status": status, **more}


def test_submit_names_secrets_and_does_not_show_their_values(
    sky, submission, monkeypatch, capfd
):
    rendered = skypilot.render(JOB, FULL)
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(Exit, match="not set in this environment: MY_KEY"):
        skypilot.submit(JOB, FULL, rendered, submission)
    monkeypatch.setenv("MY_KEY", "hush")
    assert skypilot.submit(JOB, FULL, rendered, submission) == 0
    assert capfd.readouterr() == ("", "launching\n")  # stdout may be for json=true
    (words, secret), *_ = sky.calls()
    assert words[:4] == ["jobs", "launch", "--name", JOB.name]
    secret_options = ["--secret", "WANDB_API_KEY", "--secret", SECRET_VARIABLE]
    assert words[-5:] == [*secret_options, f"{submission.folder}/{FILE}"]
    assert "--workdir" not in words  # the image has the code
    assert secret == "hush"
    texts = [f.read_text() for f in Path(submission.folder).rglob("*") if f.is_file()]
    assert "hush" not in "".join([*rendered.files.values(), *words, *texts])


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({"setup": ["nvidia-smi"]}, True),
        ({"image": "docker:a/b:c"}, False),
    ],
)
def test_submit_warns_if_nothing_installs_jax(sky, submission, caplog, keys, warned):
    cluster = replace(PLAIN, **keys)
    skypilot.submit(JOB, cluster, skypilot.render(JOB, cluster), submission)
    assert ("nothing seems to install jax" in caplog.text) is warned


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({}, True),
        ({"accelerators": "H100:8"}, False),
        ({"image": "docker:a/b:c"}, False),
        ({"setup": ["pip install jax"]}, False),
        ({"merge": {"resources": {"cpus": 8}, "setup": "pip install jax"}}, False),
    ],
)
def test_a_job_without_accelerators_image_and_setup_is_refused(keys, refused):
    mistakes = skypilot.cluster_mistakes(SkypilotCluster(**keys), "gs://bucket/run")
    assert [mistake.key for mistake in mistakes] == ["cluster.accelerators"] * refused
    for remedy in ("say H100:8", "cluster.image", "cluster.setup="):
        assert all(remedy in mistake.rule for mistake in mistakes)


def test_status_describes_the_newest_job_of_the_name(sky, submission):
    assert skypilot.status(submission) == ["SkyPilot knows no such job"]
    assert not skypilot.alive(submission)
    why = "Retrying launch soon: no H100 in us-central1"
    other_job = {**job("SUCCEEDED", 9), "job_name": "other"}
    sky.tell(job("FAILED", 2), job("STARTING", 3, details=why), other_job)
    assert skypilot.status(submission) == ["managed job 3: STARTING", why]
    assert skypilot.alive(submission)
    sky.tell(job("FAILED_NO_RESOURCE", 3, failure_reason="none", recovery_count=2))
    assert not skypilot.alive(submission)
    assert skypilot.status(submission)[1:] == ["recovered 2 times", "none"]


def test_logs_are_passed_through(sky, submission, capfd):
    assert skypilot.logs(submission, follow=True) == 100
    assert capfd.readouterr().out == "step 7\n"
    assert sky.calls()[-1][0][-3:] == ["--follow", "--tail", "0"]


def test_stop_lets_a_run_save_and_waits(sky, submission):
    sky.tell(job("RUNNING"))
    stopping = threading.Thread(target=skypilot.stop, args=(submission,))
    stopping.start()
    deadline = time.monotonic() + 60
    while not (submission.folder / STOP).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert stopping.is_alive()
    sky.tell(job("FAILED", failure_reason="exit code 130"))
    stopping.join(60)
    assert not stopping.is_alive()
    assert not [words for words, _ in sky.calls() if "cancel" in words]


def test_stop_cancels_a_job_that_does_not_run_yet(sky, submission):
    sky.tell(job("STARTING"))
    assert skypilot.stop(submission) == 0
    assert ["jobs", "cancel", "--name", JOB.name, "--yes"] in [
        words for words, _ in sky.calls()
    ]
    assert not (submission.folder / STOP).exists()


def test_skypilot_accepts_the_commands(tmp_path, monkeypatch):
    """SkyPilot refuses unknown options before it obeys --help."""
    pytest.importorskip("sky", reason="needs SkyPilot (pip install skypilot)")
    program = str(Path(sys.executable).parent / "sky")
    monkeypatch.setenv("HOME", str(tmp_path))
    verbs = [
        [*skypilot.render(JOB, PLAIN).command[1:-1], "--secret", "A"],
        ["jobs", "queue", "--all", "--output", "json"],
        ["jobs", "logs", "--name", "n", "--no-follow", "--tail", "0"],
        ["jobs", "logs", "--name", "n", "--follow", "--tail", "0"],
        ["jobs", "cancel", "--name", "n", "--yes"],
    ]
    for words in verbs:
        result = subprocess.run([program, *words, "--help"], capture_output=True)
        assert result.returncode == 0, (words, result.stderr)
    misspelled = subprocess.run([program, "jobs", "queue", "--al", "--help"])
    assert misspelled.returncode == 2
