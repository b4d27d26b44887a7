"""`python -m train`: start a run, or continue the run of the same name."""

import sys

from data.program import shown_command
from train.cli.command import Command, run_command
from train.config import Config


def main(config: Config) -> int:
    """Train, and return the exit code."""
    from train.start import start_run  # Imports JAX, which --help does not need.

    return start_run(config, shown_command("train", sys.argv[1:]))


def outcome(config: Config) -> tuple[str, float | None]:
    """Return the directory of a run, and the loss of its last evaluation, if any."""
    from train.preflight import settled_run_dir
    from train.run.folder import run_folder
    from train.run.starts import read_results
    from train.run.validations import headline

    directory = settled_run_dir(config)
    results = read_results(run_folder(directory))
    return directory, results.get(f"{headline(results)}/loss")


COMMAND = Command(main, outcome=outcome, trains=True)

if __name__ == "__main__":
    run_command(COMMAND)
