"""`python -m data.verify store=...`: read a whole store, and name what is damaged."""

from dataclasses import dataclass

from data.config import StorePath
from data.errors import Mistake
from train.cli.command import Command, run_command
from train.errors import WRONG_DATA


@dataclass(frozen=True)
class VerifyConfig:
    """Keys of `python -m data.verify`."""

    store: StorePath = None


def main(config: VerifyConfig) -> int:
    """Check every chunk and every digest; return 65 if something is damaged."""
    from data.token_store.store import open_store
    from data.token_store.verify import verify_store

    store = open_store(str(config.store))
    damaged = False
    for line in verify_store(store):
        damaged = True
        print(line)
    if damaged:
        return WRONG_DATA
    splits = store.manifest["splits"].values()
    num_tokens = sum(split["tokens"] for split in splits)
    print(f"{store.path}: all {num_tokens:,} tokens are as they were written")
    return 0


def verify_mistakes(config: VerifyConfig) -> list[Mistake]:
    """List the mistakes of a config."""
    rule = "must name a store, say store=stores/web"
    return [] if config.store else [Mistake("store", config.store, rule)]


COMMAND = Command(main, "verify", VerifyConfig, verify_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
