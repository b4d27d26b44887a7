"""`.ci/run` leaves no process running when it ends, and `.ci/full` has every extra."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE


def test_a_check_that_fails_ends_the_default_run_too(tmp_path: Path):
    """Every program is a stand-in, except those of the shell itself."""
    checkout = tmp_path / "checkout"
    programs = tmp_path / "programs"
    (checkout / ".ci").mkdir(parents=True)
    (checkout / ".ci/run").write_bytes((REPOSITORY / ".ci/run").read_bytes())
    programs.mkdir()
    number = tmp_path / "number"
    write_number = f"echo $$ >{number}.new && mv {number}.new {number}"
    venv = 'mkdir -p "$3/bin" && touch "$3/bin/activate"'
    for name, script in {
        "python3.11": venv,
        "python3.13": "exit 1",
        "pip": "",
        "uv": "",
        "python": f"[ $2 = train ] || exit 1; {write_number}; exec sleep 600",
        "ruff": f"until [ -e {number} ]; do sleep 0.01; done; exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": f"{tmp_path}"}
    result = subprocess.run(
        ["bash", ".ci/run"],
        env=env,
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "failed stages: lint, types, default run" in result.stdout
    try:
        os.kill(int(number.read_text()), 9)
    except ProcessLookupError:
        return
    raise AssertionError("the default run was still alive")


def test_all_extras_but_those_of_accelerators_are_installed():
    text = (REPOSITORY / ".ci/run").read_text()
    installed_extras = {
        name
        for names in re.findall(r"\bextras\+?=([\w,]+)", text)
        for name in names.split(",")
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    # The extra `plan` already installs the compiler of `tpu`.
    assert extras - installed_extras == {"cuda", "plan-gpu", "tpu"}


def test_the_tests_that_ci_names_exist():
    text = (REPOSITORY / ".ci/run").read_text()
    words = re.findall(r"(?<=\s)tests/\S+", text)
    assert len(words) > 5
    for word in words:
        # The shell leaves a pattern without a match unchanged.
        listing = subprocess.check_output(
            ["bash", "-c", f"echo {word}"], cwd=REPOSITORY, text=True
        )
        for name in listing.split():
            file, _, test = name.partition("::")
            assert Path(REPOSITORY, file).exists(), name
            assert not test or f"def {test}(" in Path(REPOSITORY, file).read_text()
