"""`python -m data.prepare input=... output=...`: convert text to a token store."""

import logging

from data.config_rules import text_field_mistakes, tokenizer_mistakes
from data.errors import Mistake
from data.prepare_config import PrepareConfig
from data.program import shown_command
from train.cli.command import Command, run_command
from train.errors import STOPPED

log = logging.getLogger(__name__)


def main(config: PrepareConfig) -> int:
    """Build the store unless it exists, and print its counts."""
    from data.catalog import formats_of
    from data.describe import describe_store
    from data.token_store.build import prepare_store

    try:
        store = prepare_store(config, formats_of(config))
    except KeyboardInterrupt:
        log.info("stopped; the same command continues")
        return STOPPED
    print(describe_store(store))
    if store.num_tokens("validation"):
        command = shown_command("train", ["data=tokens", f"data.path={store.path}"])
        print(f"\ntrain on it: {command}")
    else:
        print("\nno validation text: train on it in a mixture with a store that has it")
    return 0


def prepare_mistakes(config: PrepareConfig) -> list[Mistake]:
    """List the mistakes of a config."""
    mistakes = []
    if not config.inputs:
        rule = "must name files, folders or patterns, say input=corpus/"
        mistakes.append(Mistake("input", config.input, rule))
    if not config.output:
        rule = "must name the store's folder, say output=stores/corpus"
        mistakes.append(Mistake("output", config.output, rule))
    mistakes += text_field_mistakes(config.text_field)
    return mistakes + tokenizer_mistakes(config.tokenizer, config.tokenizer_sha256)


COMMAND = Command(main, "prepare", PrepareConfig, prepare_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
