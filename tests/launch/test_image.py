"""The image: what its Dockerfile promises, and what a container of it does.

The latter needs an image, and `docker` or what understands its commands:

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
    """Return what the Dockerfile's last instruction of this name says."""
    text = (REPOSITORY / "Dockerfile").read_text()
    return re.findall(rf"^{word} (.*)$", text, re.MULTILINE)[-1]


def test_it_does_not_run_as_root():
    """A number, as Kubernetes' runAsNonRoot cannot look up names."""
    assert re.fullmatch(r"[1-9]\d*:\d+", instruction("USER"))


def test_the_pinned_versions_are_those_that_the_program_allows():
    text = (REPOSITORY / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for name in ("cuda", "tpu", "s3", "gcs", "data", "hub"):
        asked += extras[name]
    for requirement in map(Requirement, asked):
        if requirement.name != "longhaul":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_only_the_program_is_sent_to_the_builder():
    """Not .git, runs, virtual environments, keys: nothing that is not named."""
    lines = (REPOSITORY / ".dockerignore").read_text().split("\n")
    first, *rest = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    assert {line.removeprefix("!") for line in rest if line.startswith("!")} == {
        *("configs", "data", "launch", "model", "train", "LICENSE", "README.md"),
        *("constraints.txt", "pyproject.toml"),
    }
    assert {*rest[-2:]} == {"**/__pycache__", "**/.*"}


ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def namespace() -> None:
    """ProcessGroup are numbered from 1 on in it, and see no others."""
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"]).returncode:
        pytest.skip("needs the right to make a namespace of processes")


def within(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as the first process that there is, or behind `words`."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [*ALONE, *words, sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("tini"), reason="needs tini")
@pytest.mark.usefixtures("namespace")
def test_behind_the_entrypoint_an_abort_is_134():
    program, *more = json.loads(instruction("ENTRYPOINT"))
    words = [str(shutil.which(Path(program).name)), *more]
    assert within("import os; os.abort()", *words).returncode == 134
    assert within("raise SystemExit(42)", *words).returncode == 42


def docker(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not IMAGE or not shutil.which("docker"),
    reason="needs docker, and LONGHAUL_IMAGE: the name of a built image",
)
def test_a_container_trains_as_any_user_and_is_stopped_and_goes_on(tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    text = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
    (runs / "text.txt").write_text(text)
    as_any = [*("run", "--network", "none", "--user", "23456:34567")]
    as_any += ["--volume", f"{runs}:/runs"]
    train = ["python", "-P", "-m", "train", *TINY, "run.name=x"]
    train += ["data.path=/runs/text.txt", "checkpoint.save_interval_steps=1000"]
    started = docker(*as_any, "--detach", IMAGE, *train, "train.num_steps=100000")
    assert started.returncode == 0, started.stderr
    container = started.stdout.strip()
    metrics = runs / "x/metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count("\n") < 6:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        docker("stop", "--time", "120", container)
        code = docker("inspect", container, "--format", "{{.State.ExitCode}}").stdout
        assert code.strip() == "42", docker("logs", container).stderr
    finally:
        docker("rm", "--force", container)
    assert metrics.stat().st_uid == 23456
    saved = max(int(p.name) for p in (runs / "x/checkpoints").glob("[0-9]*"))
    ended = docker(*as_any, "--rm", IMAGE, *train, f"train.num_steps={saved + 5}")
    assert ended.returncode == 0, ended.stderr
    rows = map(json.loads, metrics.read_text().splitlines())
    assert [r["step"] for r in rows if "loss" in r] == [*range(1, saved + 6)]
