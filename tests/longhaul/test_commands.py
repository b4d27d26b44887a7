"""Commands by their names, and texts with the command as it was typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data import program
from data.program import PREFIX, ROOT
from longhaul.commands import COMMANDS
from tests.train.cli.commands import COMMANDS as SCHEMAS

Result = subprocess.CompletedProcess[str]


def run(*arguments: str, folder: Path) -> Result:
    return subprocess.run(
        [sys.executable, "-P", "-m", "longhaul", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_each_command_of_the_program_has_a_name():
    modules = {module.removesuffix(".__main__") for module, _ in COMMANDS.values()}
    assert modules == {"train", "train.branch", "launch", *SCHEMAS}


def test_help_names_the_commands(tmp_path: Path):
    for arguments in ([], ["--help"]):
        result = run(*arguments, folder=tmp_path)
        assert result.returncode == 0
        assert all(f"\n  {name} " in result.stdout for name in COMMANDS)
    result = run("pan", folder=tmp_path)
    assert result.returncode == 78
    assert "did you mean plan?" in result.stderr


def test_texts_show_the_command_as_it_was_typed(tmp_path: Path):
    helped = run("plan", "--help", folder=tmp_path)
    assert "longhaul plan [group=choice]" in helped.stdout
    assert "python -m" not in helped.stdout
    refused = run("train", "data=tokens", "data.path=nothing", folder=tmp_path)
    assert refused.returncode == 65
    assert "longhaul data.prepare input=" in refused.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, f"python -m {PREFIX}train.plan 'a b'"),
        (("longhaul",), "longhaul plan 'a b'"),
        (("python", "mine.py"), "python mine.py plan 'a b'"),
    ],
)
def test_a_command_is_shown_quoted(monkeypatch, words, expected):
    monkeypatch.setattr(program._Starter, "words", words)
    assert program.shown_command("train.plan", ["a b"]) == expected
    for quote in "'", '"':
        advice = f"pip install -e {quote}.[s3,gcs]{quote}"
        installed = 'pip install "longhaul[s3,gcs]"' if PREFIX else advice
        assert program.with_shown_commands(advice) == installed
    text = "run python -m train.plan now, or python -m training"
    shown = program.shown_command("train.plan")
    assert program.with_shown_commands(text).startswith(f"run {shown} now")
    assert program.with_shown_commands(text).endswith("python -m training")
