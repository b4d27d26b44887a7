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


if __name__ == "__main__":
    run_command(main)
