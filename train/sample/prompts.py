"""Texts from prompts: many at once, each up to where it shall stop.

Prompts of all lengths go in one batch (train/sample/generate.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tiktoken import Encoding

from data.encoding import decode, encode
from data.sources import Sources
from model.axes import mesh_axes
from model.choices import Mlp, Position
from train.errors import ConfigError, Mistake
from train.program import Program, shards_of
from train.sample.generate import Sampling, generate

_LEAST = 64  # columns of prompts; then 128, 256, ...: few programs are compiled
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
    given = program, params, encoding, rows, num_tokens, sampling, seed, stop
    return continue_rows(*given)


def continue_rows(
    program: Program,
    params: Any,
    encoding: Encoding,
    rows: Sequence[np.ndarray | list[int]],
    num_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Continue rows of at least one token; each position sees what a training row had.

    Where the devices that share a batch divide the rows, each takes its own. Once all
    texts have ended, no more is drawn.

    Returns:
        The text of each row's next `num_tokens` tokens, up to the first of `stop`.

    Raises:
        ConfigError: if they are more than the model has positions.
    """
    config = program.config
    lengths = np.array([len(row) for row in rows], np.int32)
    learned = config.model.position is Position.learned
    if learned and (room := config.model.max_sequence_length) is not None:
        left = room - int(lengths.max())
        if num_tokens > left:
            rule = f"must be at most {left}: the model has {room} learned positions"
            raise ConfigError([Mistake("num_tokens", num_tokens, rule)])
    prompt_BP = np.zeros((len(rows), _columns(int(lengths.max()))), np.int32)
    for row, ids in zip(prompt_BP, rows, strict=True):
        row[-len(ids) :] = ids
    drawn_BT, texts = np.zeros((len(rows), 0), np.int32), list[str]()
    for drawn_BC in generate(
        program.model,
        params,
        prompt_BP,
        lengths,
        jax.random.key(seed),
        num_tokens,
        encoding.n_vocab,
        sampling,
        program.how._replace(trained_length=config.data.sequence_length),
        _cache_sharding(program, len(rows)),
    ):
        drawn_BT = np.concatenate([drawn_BT, drawn_BC], axis=1)
        whole = [decode(encoding, row) for row in drawn_BT]
        texts = [until(text, stop) for text in whole]
        if all(len(text) < len(all_) for text, all_ in zip(texts, whole, strict=True)):
            break
    return texts


def _columns(longest: int) -> int:
    """Return how many columns prompts are given: of few numbers."""
    columns = _LEAST
    while columns < longest - 1:
        columns *= 2
    return 1 + columns * (longest > 1)  # the last one is not read but drawn from


def _cache_sharding(program: Program, num_rows: int) -> NamedSharding:
    """Return where keys and values lie: rows and heads on the devices they divide."""
    config, rules, mesh = program.config, program.how.rules, program.mesh
    rows, heads = rules.spec("batch"), rules.spec("kv_heads")
    # XLA cannot cut the kernels of experts.
    cut = num_rows % shards_of(rules, mesh.shape)[0] == 0
    if not cut or config.model.mlp is not Mlp.dense:
        rows = [None]
    sizes = (mesh.shape[axis] for entry in heads for axis in mesh_axes(entry))
    if config.model.kv_heads % math.prod(sizes):
        heads = [None]
    return NamedSharding(mesh, PartitionSpec(None, *rows, None, *heads))


def until(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end it."""
    return text[: min((i for end in stop if (i := text.find(end)) >= 0), default=None)]
