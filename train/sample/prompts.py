"""Texts from prompts: many at once, each up to where it shall stop.

Prompts of all lengths go in one batch: the shared beginning is read at once, after it
each row takes its own prompt's tokens until they end, and only then what it draws.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from tiktoken import Encoding

from data.sources import Sources
from data.tokenizer import decode, encode
from model.choices import Mlp, Position
from train.errors import ConfigError, Mistake
from train.program import Program, shards_of
from train.sample.generate import Sampling, generate

_BUCKET = 64  # lengths are rounded to it, so that few programs are compiled
_PLAIN = Sampling()


def continue_prompts(
    program: Program,
    params: Any,
    sources: Sources,
    prompts: Sequence[str],
    num_tokens: int,
    sampling: Sampling = _PLAIN,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Continue each prompt, as `continue_rows` does; an empty one is an end of text.

    Args:
        program: of the model.
        params: its parameters.
        sources: whose tokenizer encodes.
        prompts: one a row of the batch.
        num_tokens: of each continuation, at most.
        sampling: how to draw.
        seed: of the draws.
        stop: texts, of which none is in a continuation: it ends before them.

    Returns:
        The continuations, without their prompts.

    Raises:
        ConfigError: if prompt and tokens are more than the model has positions.
    """
    encoding = sources.encoding
    rows = [encode(encoding, prompt.encode()) for prompt in prompts]
    rows = [row if len(row) else np.array([encoding.eot_token]) for row in rows]
    given = program, params, encoding, rows, num_tokens, sampling, seed
    return [until(text, stop) for text in continue_rows(*given)]


def continue_rows(
    program: Program,
    params: Any,
    encoding: Encoding,
    rows: Sequence[np.ndarray | list[int]],
    num_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> list[str]:
    """Continue rows of at least one token; each position sees what a training row had.

    Where the devices that share a batch divide the rows, each takes its own.

    Returns:
        The text of each row's next `num_tokens` tokens.

    Raises:
        ConfigError: if they are more than the model has positions.
    """
    config = program.config
    lengths = np.array([len(row) for row in rows], np.int32)
    learned = config.model.position is Position.learned
    room = config.model.max_sequence_length if learned else None
    if room is not None:
        left = room - int(lengths.max())
        if num_tokens > left:
            rule = f"must be at most {left}: the model has {room} learned positions"
            raise ConfigError([Mistake("num_tokens", num_tokens, rule)])
    shared, longest = int(lengths.min()), int(lengths.max())
    if shared < longest:
        shared = max(1, shared - shared % _BUCKET)
        # Not beyond learned positions.
        longest = -(-longest // _BUCKET) * _BUCKET
        longest = longest if room is None else min(longest, room - num_tokens)
    prompt_BP = np.zeros((len(rows), longest), np.int32)
    for row, ids in zip(prompt_BP, rows, strict=True):
        row[: len(ids)] = ids
    placed, rules = (jnp.asarray(prompt_BP), jnp.asarray(lengths)), program.how.rules
    shards, _ = shards_of(rules, program.mesh.shape)
    # XLA cannot cut the kernels of experts.
    if len(rows) % shards == 0 and config.model.mlp is Mlp.dense:
        placed = jax.device_put(
            placed, NamedSharding(program.mesh, rules.spec("batch"))
        )
    tokens_BT = generate(
        program.model,
        params,
        *placed,
        jax.random.key(seed),
        shared,
        num_tokens,
        encoding.n_vocab,
        sampling,
        program.how._replace(trained_length=config.data.sequence_length),
    )
    tokens_BT = jax.device_get(jax.device_put(tokens_BT, program.replicated))
    own = zip(tokens_BT, lengths - shared, strict=True)
    return [decode(encoding, row[at : at + num_tokens]) for row, at in own]


def until(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end it."""
    return text[: min((i for end in stop if (i := text.find(end)) >= 0), default=None)]
