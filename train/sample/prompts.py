"""Continue prompts of all lengths in one batch, each up to a stop text."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tiktoken import Encoding

from data.beginning import Beginning
from data.encoding import END_OF_TEXT, decode, encode
from data.errors import Mistake
from model.axes import mesh_axes
from model.choices import Mlp, Position
from train.errors import ConfigError
from train.resolve.program import ConfiguredProgram
from train.sample.generate import Decoder, Sampling, generate

# The cache of prompts has 64, 128, 256, ... columns, so that few programs are compiled.
_MIN_COLUMNS = 64


def prompt_rows(
    encoding: Encoding, prompts: Sequence[str], beginning: Beginning
) -> list[list[int]]:
    """Encode each prompt as the beginning of a text."""
    rows = (encode(encoding, prompt.encode()).tolist() for prompt in prompts)
    return [beginning.before(row) for row in rows]


def continue_rows(
    program: ConfiguredProgram,
    params: Any,
    encoding: Encoding,
    rows: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Return the text that continues each row of at least one token.

    A position sees at most as many keys as a row had in training. Rows are sharded if
    the number of batch shards divides their number. Drawing ends early if all texts
    have reached a stop text. End-of-text is such a text if documents have beginning
    tokens: the model has then learned nothing about what follows it.

    Args:
        program: the program of the model.
        params: the model's parameters.
        encoding: the tokenizer.
        rows: the token ids of each prompt.
        num_tokens: the maximum number of tokens of a continuation.
        sampling: how a token is drawn.
        seed: the seed of the draws.
        stop: a continuation ends before the first of these texts.

    Returns:
        The continuations, without their prompts.

    Raises:
        ConfigError: if the model has too few learned positions for the result.
    """
    model = program.config.model
    data = program.config.data
    stop = [*stop, END_OF_TEXT] if data.has_beginning_tokens else stop
    lengths = np.array([len(row) for row in rows], np.int32)
    max_positions = model.max_sequence_length
    if model.position is Position.learned and max_positions is not None:
        max_tokens = max_positions - int(lengths.max())
        if num_tokens > max_tokens:
            rule = f"must be at most {max_tokens}: the model has {max_positions} "
            rule += "learned positions"
            raise ConfigError([Mistake("num_tokens", num_tokens, rule)])
    prompt_BP = np.zeros((len(rows), _num_columns(int(lengths.max()))), np.int32)
    for row, ids in zip(prompt_BP, rows, strict=True):
        row[-len(ids) :] = ids
    decoder = make_decoder(program, encoding.n_vocab, sampling, len(rows))
    drawn_BT = np.zeros((len(rows), 0), np.int32)
    texts = list[str]()
    for drawn_BC in generate(
        decoder, params, prompt_BP, lengths, jax.random.key(seed), num_tokens=num_tokens
    ):
        drawn_BT = np.concatenate([drawn_BT, drawn_BC], axis=1)
        decoded = [decode(encoding, row) for row in drawn_BT]
        texts = [text_before(text, stop) for text in decoded]
        if all(len(t) < len(d) for t, d in zip(texts, decoded, strict=True)):
            break
    return texts


def _num_columns(longest: int) -> int:
    """Return the number of columns for prompts of at most `longest` tokens.

    The last column is not part of the cache: the first token is drawn from this column.
    """
    cached_columns = _MIN_COLUMNS
    while cached_columns < longest - 1:
        cached_columns *= 2
    return 1 + cached_columns * (longest > 1)


def make_decoder(
    program: ConfiguredProgram, vocab_size: int, sampling: Sampling, num_rows: int
) -> Decoder:
    """Return a decoder whose cache is sharded over rows and heads where divisible."""
    config = program.config
    mesh = program.mesh
    rules = program.execution.placement.rules
    rows_spec = rules.spec("batch")
    heads_spec = rules.spec("kv_heads")
    is_divisible = num_rows % program.batch_shards.rows == 0
    # XLA cannot partition the kernels of experts.
    if not is_divisible or config.model.mlp is not Mlp.dense:
        rows_spec = [None]
    sizes = (mesh.shape[axis] for entry in heads_spec for axis in mesh_axes(entry))
    if config.model.has_latent_attention or config.model.kv_heads % math.prod(sizes):
        heads_spec = [None]
    spec = PartitionSpec(None, *rows_spec, None, *heads_spec)
    return Decoder(
        program.model,
        program.execution,
        vocab_size,
        sampling,
        trained_length=config.data.sequence_length,
        cache_sharding=NamedSharding(mesh, spec),
    )


def text_before(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop text in it."""
    return text[: min((i for end in stop if (i := text.find(end)) >= 0), default=None)]
