"""`python -m data.train_tokenizer input=... output=...`: learn a tokenizer.

The command writes a rank file, and prints the two settings that make a run use it.
"""

import hashlib
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from typing_extensions import Doc

from data.bpe import NUM_BYTES, hold_out, texts_of, train
from data.catalog import formats_of
from data.config import (
    ByteCount,
    FileFormat,
    InputPaths,
    Pattern,
    TextField,
    TextSeparator,
    inputs_of,
)
from data.config_rules import text_field_mistakes
from data.encoding import encode
from data.errors import DataError, Mistake
from data.storage import created_atomically, local_path
from data.text.records import ReadSettings, separator_of, text_field_of
from data.tokenizer import load_tokenizer
from train.cli.command import Command, run_command

MAX_VOCAB_SIZE = 2**20  # four times the largest published vocabulary

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Keys of `python -m data.train_tokenizer`."""

    input: InputPaths = None
    output: Annotated[str | None, Doc("The rank file to write.")] = None
    pattern: Pattern = "**/*"
    format: FileFormat = None
    text_field: TextField = "text"
    text_separator: TextSeparator = r"\n\n"
    vocab_size: Annotated[
        int,
        Ge(NUM_BYTES + 1),
        Le(MAX_VOCAB_SIZE),
        Doc(
            "The number of tokens, with the 256 single bytes but without <|endoftext|>."
        ),
    ] = 32000
    max_bytes: Annotated[
        ByteCount,
        Doc(
            "The number of bytes of text to learn from. 2**28 take a minute and 0.7 GB "
            "on two cores."
        ),
    ] = 2**28


def train_tokenizer_mistakes(config: TrainTokenizerConfig) -> list[Mistake]:
    """List the mistakes of a config."""
    mistakes = []
    inputs = inputs_of(config.input)
    if not inputs:
        rule = "must name files, folders or patterns, say input=corpus/"
        mistakes.append(Mistake("input", config.input, rule))
    if not config.output:
        rule = "must name the rank file to write, say output=mine.tiktoken"
        mistakes.append(Mistake("output", config.output, rule))
    else:
        output = Path(config.output).expanduser().resolve()
        for name in inputs:
            if output.is_relative_to(Path(name).expanduser().resolve()):
                rule = f"must lie outside of the input {name}, which is read as text"
                mistakes.append(Mistake("output", config.output, rule))
    return mistakes + text_field_mistakes(config.text_field)


def main(config: TrainTokenizerConfig) -> int:
    """Learn a rank file, write it, and print the settings that name it."""
    assert config.output is not None
    output = local_path(config.output)
    # Check the output before learning, which may take an hour.
    if not os.access(output.parent, os.W_OK):
        raise DataError(
            f"output={output}: {output.parent} is no folder that can be written to. "
            f"Create it, or name another"
        )
    if output.exists():
        raise DataError(
            f"output={output}: is there already. Remove it, or name another"
        )
    inputs = inputs_of(config.input)
    _log.info("learning %d tokens from %s", config.vocab_size, ", ".join(inputs))
    held_out_pieces: list[str] = []
    read_settings = ReadSettings(
        text_field_of(config.text_field),
        format=config.format,
        text_separator=separator_of(config.text_separator),
    )
    formats = formats_of(config)
    texts = texts_of(inputs, config.max_bytes, read_settings, formats, config.pattern)
    content = train(hold_out(texts, held_out_pieces), config.vocab_size)
    try:
        with created_atomically(output) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise DataError(
            f"output={output}: cannot be written ({error}). Make room, or name another"
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    encoding = load_tokenizer(str(output), sha256)
    if text := "".join(held_out_pieces).encode():
        _log.info(
            "%.2f bytes per token on %d bytes of held-out text (single bytes: 1.00)",
            len(text) / len(encode(encoding, text)),
            len(text),
        )
    else:
        _log.warning("the text is too short for any of it to be held out")
    settings = [f"data.tokenizer={output}", f"data.tokenizer_sha256={sha256}"]
    print(shlex.join(settings))
    prepare_settings = [setting.removeprefix("data.") for setting in settings]
    _log.info("for data.prepare: %s", shlex.join(prepare_settings))
    return 0


COMMAND = Command(
    main, "train_tokenizer", TrainTokenizerConfig, train_tokenizer_mistakes
)

if __name__ == "__main__":
    run_command(COMMAND)
