"""`python -m data.prepare input=... output=...`: text to a token store."""

import sys

from data.config import PrepareConfig
from train.command import run_command
from train.config import Mistake


def main(config: PrepareConfig) -> int:
    """Encode the input, or say that it is encoded already; print the store's counts."""
    from data.build import prepare_store
    from data.describe import describe_store

    store = prepare_store(config)
    print(describe_store(store))
    print(f"\ntrain on it: python -m train data=tokens data.path={store.path}")
    return 0


def validate(config: PrepareConfig) -> list[Mistake]:
    """List the mistakes of a config."""
    return [Mistake(*mistake) for mistake in config.mistakes()]


if __name__ == "__main__":
    run_command(main, "prepare", PrepareConfig, validate)
    sys.exit()
