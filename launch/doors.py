"""Other commands of this program, run on this machine in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]  # where its packages lie


def run_door(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m <module> <arguments>`, from the same files as this process.

    Args:
        module: the command.
        arguments: its own.
        variables: of its environment, beside those of this process.
        how: of `subprocess.run`.
    """
    env = {**os.environ, **(variables or {}), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.run(command, env=env, text=True, **how)
