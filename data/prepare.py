"""`python -m data.prepare input=... output=...`: convert text to a token store."""

import logging

from data.prepare_config import PrepareConfig
from train.cli.command import run_command
from train.errors import STOPPED, Mistake

log = logging.getLogger(__name__)


def main(config: PrepareConfig) -> int:
    """Build the store unless it exists, and print its counts."""
    from data.catalog import FORMATS
    from data.describe import describe_store
    from data.token_store.build import prepare_store

    try:
        store = prepare_store(config, FORMATS)
    except KeyboardInterrupt:
        log.info("stopped; the same command continues")
        return STOPPED
    print(describe_store(store))
    if store.num_tokens("validation"):
        print(f"\ntrain on it: python -m train data=tokens data.path={store.path}")
    else:
        print("\nno validation text: train on it in a mixture with a store that has it")
    return 0


def prepare_mistakes(config: PrepareConfig) -> list[Mistake]:
    """List the mistakes of a config."""
    return [Mistake(*mistake) for mistake in config.mistakes()]


if __name__ == "__main__":
    run_command(main, "prepare", PrepareConfig, prepare_mistakes)
