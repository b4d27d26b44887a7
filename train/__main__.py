"""`python -m train`: train, or continue the run of that name."""

import os
import shlex
import signal
import sys

from train.cli.command import run_command
from train.cli.leaving import leave
from train.config import Config
from train.errors import PREEMPTED

_TYPED = shlex.join(["python", "-m", "train", *sys.argv[1:]])


def main(config: Config) -> int:
    """Train."""
    from train.start import train  # JAX and all: not for --help or a typing mistake

    return train(config, _TYPED)


def outcome(config: Config) -> tuple[str, float | None]:
    """Return the directory of a run, and the loss of its last evaluation, if any."""
    from train.run.folder import run_folder
    from train.run.starts import read_results
    from train.start import settled_run_dir

    directory = settled_run_dir(config)
    return directory, read_results(run_folder(directory)).get("eval/loss")


def leave_when_told() -> None:
    """Have a preemption notice end this process at once, while nothing has begun.

    Until the trainer hears signals itself, behind the import of JAX; else such a start
    would count as a crash.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: os._exit(PREEMPTED))


if __name__ == "__main__":
    leave_when_told()
    try:
        run_command(main, outcome=outcome)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else bool(end.code))
