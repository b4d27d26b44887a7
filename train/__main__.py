"""`python -m train`: train, or continue the run of that name."""

import shlex
import sys

from train.cli.command import run_command
from train.config import Config

_TYPED = shlex.join(["python", "-m", "train", *sys.argv[1:]])


def main(config: Config) -> int:
    """Train."""
    from train.start import train  # JAX and all: not for --help or a typing mistake

    return train(config, _TYPED)


def outcome(config: Config) -> tuple[str, float | None]:
    """Return the directory of a run, and the loss of its last evaluation, if any."""
    from train.run.starts import read_results
    from train.run.storage import run_folder
    from train.start import settled_run_dir

    directory = settled_run_dir(config)
    return directory, read_results(run_folder(directory)).get("eval/loss")


if __name__ == "__main__":
    run_command(main, outcome=outcome)
