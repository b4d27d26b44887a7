"""`python -m train.checkpoints run.dir=...`: list checkpoints, and check them."""

import time
from dataclasses import dataclass, field

from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Config, RunConfig
from train.errors import WRONG_DATA


@dataclass(frozen=True)
class CheckpointsConfig:
    """Keys of `python -m train.checkpoints`."""

    run: RunConfig = field(default_factory=RunConfig)
    verify: bool = True  # read and hash every file; false: only list


def main(asked: CheckpointsConfig) -> int:
    """Print step, size, age and verdict of each; exit 65 if one is damaged."""
    from train.console import print_table
    from train.identity import run_dir
    from train.run.digests import damage, is_sealed, size
    from train.run.storage import run_folder, written_at
    from train.units import format_bytes

    folder = run_folder(run_dir(Config(run=asked.run))) / "checkpoints"
    rows, all_good = [], True
    steps = [p for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
    for path in sorted(steps, key=lambda path: int(path.name)):
        verdict = "sealed" if is_sealed(path) else "not sealed yet"
        if asked.verify and is_sealed(path):
            wrong = damage(path)
            verdict = "verified" if wrong is None else f"DAMAGED: {wrong}"
            all_good = all_good and wrong is None
        minutes = (time.time() - written_at(path)) / 60
        rows.append([path.name, format_bytes(size(path)), f"{minutes:,.0f}", verdict])
    print_table(
        rows, ["step", "size", "minutes ago", "files"], f"checkpoints of {folder}"
    )
    quarantine = folder / "quarantine"
    aside = sorted(p.name for p in quarantine.iterdir()) if quarantine.exists() else []
    if aside:
        print(f"set aside in {quarantine}: {', '.join(aside)}")
    return 0 if all_good else WRONG_DATA


if __name__ == "__main__":
    run_command(main, "checkpoints", CheckpointsConfig, must_name_run)
