"""The image: the promises of its Dockerfile, and the behaviour of a container.

The test of a container needs an image, and `docker` or a program with its commands:

    docker build --tag longhaul .
    LONGHAUL_IMAGE=longhaul pytest -m slow tests/launch/test_image.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.fleet import REPOSITORY, TINY

IMAGE = os.environ.get("LONGHAUL_IMAGE", "")


def instruction(word: str) -> str:
    """Return the arguments of the Dockerfile's last instruction of this name."""
    text = (REPOSITORY / "Dockerfile").read_text()
    return re.findall(rf"^{word} (.*)$", text, re.MULTILINE)[-1]


def test_the_image_does_not_run_as_root():
    """The user is a number, as Kubernetes' runAsNonRoot cannot look up names."""
    assert re.fullmatch(r"[1-9]\d*:\d+", instruction("USER"))


def test_the_program_allows_the_pinned_versions():
    text = (REPOSITORY / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
    ]
    for name in ("cuda", "tpu", "s3", "gcs", "data", "hub"):
        requirements += extras[name]
    for requirement in map(Requirement, requirements):
        if requirement.name != "longhaul":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_only_the_program_is_sent_to_the_builder():
    """Only named paths are sent: no .git, runs, virtual environments or keys."""
    lines = (REPOSITORY / ".dockerignore").read_text().split("\n")
    first, *patterns = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    assert {line.removeprefix("!") for line in patterns if line.startswith("!")} == {
        *(
            "configs",
            "data",
            "launch",
            "longhaul",
            "model",
            "train",
            "LICENSE",
            "README.md",
        ),
        *("constraints.txt", "pyproject.toml"),
    }
    assert {*patterns[-2:]} == {"**/__pycache__", "**/.*"}


ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def namespace() -> None:
    """Skip unless a process namespace can be made; its processes start at 1."""
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"]).returncode:
        pytest.skip("needs the right to make a namespace of processes")


def run_in_namespace(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as process 1 of a namespace, or as a child of the command `words`."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [*ALONE, *words, sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("tini"), reason="needs tini")
@pytest.mark.usefixtures("namespace")
def test_an_abort_under_the_entrypoint_exits_with_134():
    program, *more = json.loads(instruction("ENTRYPOINT"))
    words = [str(shutil.which(Path(program).name)), *more]
    assert run_in_namespace("import os; os.abort()", *words).returncode == 134
    assert run_in_namespace("raise SystemExit(42)", *words).returncode == 42


def docker(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not IMAGE or not shutil.which("docker"),
    reason="needs docker, and LONGHAUL_IMAGE: the name of a built image",
)
def test_a_container_trains_as_any_user_and_stops_and_resumes(tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    text = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
    (runs / "text.txt").write_text(text)
    run_as_user = [*("run", "--network", "none", "--user", "23456:34567")]
    run_as_user += ["--volume", f"{runs}:/runs"]
    train = ["python", "-P", "-m", "longhaul", "train", *TINY, "run.name=x"]
    train += ["data.path=/runs/text.txt", "checkpoint.save_interval_steps=1000"]
    first_start = docker(
        [*run_as_user, "--detach", IMAGE, *train, "train.num_steps=100000"]
    )
    assert first_start.returncode == 0, first_start.stderr
    container = first_start.stdout.strip()
    metrics = runs / "x/metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count("\n") < 6:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        docker(["stop", "--time", "120", container])
        code = docker(["inspect", container, "--format", "{{.State.ExitCode}}"]).stdout
        assert code.strip() == "42", docker(["logs", container]).stderr
    finally:
        docker(["rm", "--force", container])
    assert metrics.stat().st_uid == 23456
    saved_step = max(int(p.name) for p in (runs / "x/checkpoints").glob("[0-9]*"))
    second_start = docker(
        [*run_as_user, "--rm", IMAGE, *train, f"train.num_steps={saved_step + 5}"]
    )
    assert second_start.returncode == 0, second_start.stderr
    rows = map(json.loads, metrics.read_text().splitlines())
    assert [r["step"] for r in rows if "loss" in r] == [*range(1, saved_step + 6)]
