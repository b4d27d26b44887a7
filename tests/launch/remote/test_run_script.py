"""run.sh on a host: its verbs, and values that must arrive there verbatim."""

import fcntl
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.config.clusters import Code
from launch.job import Job, start_words
from launch.remote import ssh, tpu_vm
from tests.launch.hostile import VALUES, argument_printer, printed, program
from tests.launch.remote.stage import SSH, TPU, until
from train.cli.quoting import hydra_text

JOB = Job("job", "gs://a/b", "folder", (), "/root", "/tmp")


def run_here(folder: Path, text: str, **more: str) -> str:
    """Run `run.sh start` with stubs first on the PATH; return the process's code."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "run.sh").write_text(text)
    path = f"{folder}/bin:{os.environ['PATH']}"
    command = ["bash", str(folder / "run.sh"), "start", "0", "1"]
    subprocess.run(command, env={**os.environ, "PATH": path, **more}, check=True)
    code_file = folder / "process-0/code"
    until(code_file.exists)
    return code_file.read_text().strip()


@pytest.mark.parametrize(
    ("backend", "cluster", "python"),
    [
        (ssh, SSH, "trainer"),
        (ssh, replace(SSH, code=Code.archive), "trainer"),
        (tpu_vm, replace(TPU, code=Code.archive), "trainer"),
        (tpu_vm, replace(TPU, code=Code.image, image="registry/image:tag"), "sudo"),
    ],
)
def test_hostile_values_arrive_verbatim(tmp_path, backend, cluster, python):
    environment = {f"SAID_{n}": value for n, value in enumerate(VALUES)}
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    job = replace(JOB, overrides=overrides, environment=environment)
    argument_printer(tmp_path / "bin", python)
    assert run_here(tmp_path, backend.render(job, cluster).files["run.sh"]) == "0"
    words = printed(tmp_path / "bin")[-1]
    start = start_words("train", "python", cluster.code)[1:]
    expected = [*start, *overrides]
    assert words[-len(expected) :] == expected
    assert ("docker" in words) == (cluster.code is Code.image)


def test_hostile_values_of_the_environment_arrive_verbatim(tmp_path):
    environment = {f"SAID_{n}": value for n, value in enumerate(VALUES)}
    job = replace(JOB, environment=environment)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/trainer", "#!/bin/sh\nenv -0\n")
    assert run_here(tmp_path, ssh.render(job, SSH).files["run.sh"]) == "0"
    variables = (tmp_path / "process-0/log").read_bytes().decode().split("\0")
    assert {f"{name}={value}" for name, value in environment.items()} <= {*variables}


@pytest.mark.parametrize("had", [True, False])
def test_secrets_are_fetched_on_the_host(tmp_path, had):
    cluster = replace(TPU, secrets={"KEY": "it's $HOME"}, project="p")
    (tmp_path / "bin").mkdir()
    script = 'printf "%s\\n" "$@" >"$OUT"; echo secret' if had else "exit 78"
    program(tmp_path / "bin/gcloud", f"#!/bin/sh\n{script}\n")
    program(tmp_path / "bin/trainer", '#!/bin/sh\necho "$KEY"\n')
    text = tpu_vm.render(JOB, cluster).files["run.sh"]
    assert run_here(tmp_path, text, OUT=f"{tmp_path}/asked") == ("0" if had else "1")
    log = (tmp_path / "process-0/log").read_text()
    if had:
        assert log == "secret\n"
        arguments = (tmp_path / "asked").read_text().splitlines()
        assert arguments[-3:] == ["latest", "--secret=it's $HOME", "--project=p"]
    else:
        assert log == "a line before training failed\n"


def test_a_signal_that_no_process_receives_is_not_reported(tmp_path):
    (tmp_path / "run.sh").write_text(ssh.render(JOB, SSH).files["run.sh"])
    (tmp_path / "process-0").mkdir()
    (tmp_path / "process-0/pid").write_text("4194305")  # above every system's limit
    with (tmp_path / "process-0/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["bash", str(tmp_path / "run.sh"), "signal", "0", "1", "INT"]
        assert not subprocess.run(command, capture_output=True, check=True).stdout
