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
    from train.start import start_run  # slow: --help does not need JAX

    return start_run(config, _TYPED)


def outcome(config: Config) -> tuple[str, float | None]:
    """Return the directory of a run, and the loss of its last evaluation, if any."""
    from train.preflight import settled_run_dir
    from train.run.folder import run_folder
    from train.run.starts import read_results

    directory = settled_run_dir(config)
    return directory, read_results(run_folder(directory)).get("eval/loss")


def leave_when_told() -> None:
    """Let a preemption notice end this process at once, until training begins.

    The trainer handles signals itself once JAX is imported. Without this, a notice
    during the import would count as a crash.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: os._exit(PREEMPTED))


if __name__ == "__main__":
    leave_when_told()
    try:
        run_command(main, outcome=outcome)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else bool(end.code))
