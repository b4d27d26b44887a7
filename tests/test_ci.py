"""`.ci/run`: the slices of slow tests that it takes, and what it leaves behind."""

import os
import subprocess
from pathlib import Path

from tests.fleet import REPOSITORY
from tests.slow_slice import BUDGET_S, chosen, listed, seconds_of, two_thirds

NAMES = [f"tests/test_{number}.py::test" for number in range(100)]


def test_every_test_that_fits_has_its_turn(monkeypatch):
    seconds = {NAMES[3]: BUDGET_S + 1.0, NAMES[7]: BUDGET_S - 1.0, NAMES[8]: 100.0}
    monkeypatch.setattr("tests.slow_slice.listed", lambda: seconds)
    turns = [chosen(NAMES, number) for number in range(len(NAMES))]
    assert set().union(*turns) == {*NAMES} - {NAMES[3]}
    for names in turns:
        assert 0 < sum(map(seconds_of, names)) <= BUDGET_S


def test_every_test_of_the_model_is_in_one_third():
    model = [f"tests/model/test_{number}.py::test" for number in range(10)]
    thirds = [{*NAMES, *model} - {*two_thirds(NAMES + model, n)} for n in (5, 6, 7)]
    assert set.union(*thirds) == {*NAMES, *model}
    assert sum(map(len, thirds)) == 3 * len(NAMES) + len(model)


def test_the_list_names_tests_that_there_are():
    for name in listed():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()


def test_a_check_that_fails_ends_the_default_run_too(tmp_path: Path):
    """All programs but the shell's own are stand-ins."""
    checkout, programs = tmp_path / "checkout", tmp_path / "programs"
    (checkout / ".ci").mkdir(parents=True)
    (checkout / ".ci/run").write_bytes((REPOSITORY / ".ci/run").read_bytes())
    programs.mkdir()
    number = tmp_path / "number"
    venv = 'mkdir -p "$3/bin" && touch "$3/bin/activate"'
    for name, does in {
        "python3.11": venv,
        "python3.13": "exit 1",
        "pip": "",
        "uv": "",
        "python": f"echo $$ >{number}.new && mv {number}.new {number}; exec sleep 600",
        "ruff": f"until [ -e {number} ]; do sleep 0.01; done; exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": f"{tmp_path}"}
    done = subprocess.run(
        ["bash", ".ci/run"],
        env=env,
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "failed stages: lint, types, default run" in done.stdout
    try:
        os.kill(int(number.read_text()), 9)
    except ProcessLookupError:
        return
    raise AssertionError("the default run was still alive")
