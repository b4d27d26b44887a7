"""`python -m data.inspect store=...` or `run.name=... step=...`: look at the data."""

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated

from typing_extensions import Doc

from data.config import (
    DataConfig,
    EndToken,
    Packing,
    RankFileHash,
    Seed,
    Source,
    StorePath,
    TokenFormat,
    Tokenizer,
)
from data.config_rules import tokenizer_mistakes
from data.errors import Mistake
from train.cli.command import Command, run_command
from train.config import Config, Count, Number, RunConfig
from train.identity import run_dir


@dataclass(frozen=True)
class InspectConfig:
    """Keys of `python -m data.inspect`. run.dir or run.name shows a batch of a run."""

    run_schema = Config  # A catalog replaces it by a dataclass with added parts.

    store: StorePath = None
    format: Annotated[
        TokenFormat, Doc("How the store holds tokens; token files need a tokenizer.")
    ] = TokenFormat.store
    tokenizer: Tokenizer = "bytes"
    tokenizer_sha256: RankFileHash = None
    end_token: EndToken = None
    run: RunConfig = field(default_factory=RunConfig)
    step: Annotated[
        Number | None,
        Doc("Show the batch of this step; the first is 0. null shows the store."),
    ] = None
    samples: Annotated[Number, Doc("The number of documents to show from a store.")] = 4
    width: Annotated[
        Number, Doc("The number of characters to show of each document.")
    ] = 60
    seed: Annotated[
        Seed, Doc("The seed of a store's samples and batches. A run has its own.")
    ] = 0
    sequence_length: Annotated[
        Count, Doc("The row length of a store's batches. A run has its own.")
    ] = 1024
    batch_size: Annotated[
        Count, Doc("The number of rows in a store's batches. A run has its own.")
    ] = 8
    packing: Annotated[
        Packing, Doc("How a store's documents become rows. A run has its own.")
    ] = Packing.concat


def main(config: InspectConfig) -> int:
    """Print what a store holds, or which documents make up a batch."""
    from data.batches import Order
    from data.catalog import text_store
    from data.describe import (
        describe_batch,
        describe_lengths,
        describe_sample,
        describe_store,
    )
    from data.excerpts import excerpts
    from data.sources import open_sources
    from data.splits import SPLITS
    from data.token_store.store import open_store

    seed = config.seed
    is_store = config.format is TokenFormat.store
    data = DataConfig(
        name=PurePosixPath(config.store or "").name,
        source=Source.tokens if is_store else Source(config.format.value),
        path=config.store,
        tokenizer=config.tokenizer,
        tokenizer_sha256=config.tokenizer_sha256,
        end_token=config.end_token,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        packing=config.packing,
    )
    if config.step is None:
        store = open_store(str(config.store)) if is_store else text_store(data)
        print(describe_store(store))
        for split in SPLITS:
            print("\n" + describe_lengths(store, split))
        text = describe_sample(store, "train", config.samples, seed, 4 * config.width)
        print(f"\n{text}")
        return 0
    if config.run.dir or config.run.name:
        from train.run.starts import read_run

        run = read_run(run_dir(Config(run=config.run)), config.step, config.run_schema)
        data = run.data
        seed = run.seed
    order = Order(open_sources(data, text_store, to_evaluate=False), data, seed)
    number = order.batch_number(config.step)
    if number > config.step:
        print(f"batch {number}, as data.skip_batches leaves out {number - config.step}")
    for line in describe_batch(excerpts(order, config.step), config.width):
        print(line)
    return 0


def inspect_mistakes(config: InspectConfig) -> list[Mistake]:
    """List the missing and contradictory keys."""
    mistakes = []
    names_run = bool(config.run.dir or config.run.name)
    if bool(config.store) == names_run:
        rule = "name either a store (store=stores/web) or a run (run.name=base)"
        mistakes.append(Mistake("store", config.store, rule))
    if names_run and config.step is None:
        rule = "must say which batch of the run to show, say step=1000"
        mistakes.append(Mistake("step", config.step, rule))
    return mistakes + tokenizer_mistakes(config.tokenizer, config.tokenizer_sha256)


COMMAND = Command(main, "inspect", InspectConfig, inspect_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
