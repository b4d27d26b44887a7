"""These fixtures run a program in this process or in its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import REPOSITORY
from tests.program import program_code
from train.cli.command import Command, run_command

PROGRAM = """
import os, sys
from train.cli.command import Command, run_command, config_yaml
from train.config import Config
from train.errors import ConfigError
from data.errors import DataError, Mistake

def main(config: Config) -> int:
    if config.seed == 65:
        raise DataError("/corpus is damaged; prepare it again")
    if config.seed == 78:
        raise ConfigError([Mistake("mesh.fsdp", 3, "must divide 8")])
    if config.seed == 1:
        raise RuntimeError("a crash")
    if config.seed == 6:
        os.abort()
    if config.seed == 9:
        sys.exit(9)
    print("seed", config.seed, "pid", os.getpid())
    print(config_yaml(config))
    return 42 if config.seed == 42 else 0

if __name__ == "__main__":
    run_command(Command(main, outcome=lambda config: ("runs/x", 1.5)))
"""
Result = subprocess.CompletedProcess[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Work in an empty folder, which must still be empty after the test."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    assert list((tmp_path / "here").iterdir()) == []


@pytest.fixture
def process(here: Path) -> Callable[..., Result]:
    """Return a function that runs the program in its own process."""
    (here / "code").mkdir()
    (here / "code" / "program.py").write_text(program_code(PROGRAM))
    path = os.pathsep.join([str(REPOSITORY), str(here / "code")])
    return lambda *arguments: subprocess.run(
        [sys.executable, "-m", "program", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def run(here: Path, monkeypatch, capsys) -> Callable[..., Result]:
    """Return a function that runs the program, or another command, in this process."""
    program = dict[str, Any](__name__="program")
    exec(program_code(PROGRAM), program)

    def run_here(
        *arguments: str, command: tuple[Any, ...] = (program["main"],)
    ) -> Result:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        choices = command[4] if command[4:] else []
        with pytest.raises(SystemExit) as exit_:
            run_command(Command(*command[:4], default_choices=lambda _: choices))
        code = exit_.value.code or 0
        assert isinstance(code, int)
        return Result([], code, *capsys.readouterr())

    return run_here


def entry(result: subprocess.CompletedProcess[str], title: str) -> str:
    """Return the text under one mistake of the list."""
    assert result.returncode == 78
    assert "Traceback" not in result.stderr
    blocks = result.stderr.split("\n\n  ")
    (block,) = [block for block in blocks if block.splitlines()[0] == title]
    return block.partition("\n")[2]
