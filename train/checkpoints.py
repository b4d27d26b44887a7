"""`python -m train.checkpoints run.dir=...`: list and verify checkpoints."""

import time
from dataclasses import dataclass, field
from typing import Annotated

from etils import epath
from typing_extensions import Doc

from train.cli.command import Command, run_command
from train.cli.rules import must_name_run
from train.config import Config, RunConfig
from train.errors import WRONG_DATA

_DAMAGED = "DAMAGED"
_MISPLACED = "MISPLACED"


@dataclass(frozen=True)
class CheckpointsConfig:
    """Keys of `python -m train.checkpoints`."""

    run: RunConfig = field(default_factory=RunConfig)
    verify: Annotated[
        bool, Doc("Read and hash every file. false only lists the checkpoints.")
    ] = True


def main(config: CheckpointsConfig) -> int:
    """Print each checkpoint's step, size, age and verdict; return 65 if one is bad.

    Raises:
        ConfigError: if there is no such run.
    """
    from train.console import print_table
    from train.identity import run_dir
    from train.run.digests import saved_steps
    from train.run.starts import existing_run, recorded_run_id

    run = existing_run(run_dir(Config(run=config.run)))
    folder = run / "checkpoints"
    run_id = recorded_run_id(run)
    paths = [folder / str(step) for step in saved_steps(folder)]
    rows = [row for path in paths if (row := _table_row(path, config.verify, run_id))]
    any_bad = any(row[-1].startswith((_DAMAGED, _MISPLACED)) for row in rows)
    headers = ["step", "size", "minutes ago", "files"]
    print_table(rows, headers, f"checkpoints of {folder}")
    quarantine = folder / "quarantine"
    if quarantine.exists() and (names := sorted(p.name for p in quarantine.iterdir())):
        print(f"set aside in {quarantine}: {', '.join(names)}")
    return WRONG_DATA if any_bad else 0


def _table_row(path: epath.Path, verify: bool, run_id: str | None) -> list[str] | None:
    """Return a checkpoint's table row, or None if it was deleted in the meantime."""
    from data.storage import modified_at
    from train.run.digests import find_damage, is_sealed, misplacement, step_bytes
    from train.units import format_bytes

    try:
        verdict = "sealed" if is_sealed(path) else "not sealed yet"
        if verify and is_sealed(path):
            verdict = "verified"
            if reason := find_damage(path):
                verdict = f"{_DAMAGED}: {reason}"
            elif reason := misplacement(path, run_id):
                verdict = f"{_MISPLACED}: {reason}"
        minutes = (time.time() - modified_at(path)) / 60
        row = [path.name, format_bytes(step_bytes(path)), f"{minutes:,.0f}", verdict]
    except FileNotFoundError:
        if path.exists():
            raise
        return None
    return row if path.exists() else None


COMMAND = Command(main, "checkpoints", CheckpointsConfig, must_name_run)

if __name__ == "__main__":
    run_command(COMMAND)
