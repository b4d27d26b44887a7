"""Text from a model: prompts are read at once, then tokens drawn one by one.

A prompt stands at the right end of its row: those of all lengths end in the same column
and draw their tokens in the same steps. Few programs serve them all: one for each
number of columns and of rows.

Shapes: B samples, P columns of prompts, C tokens drawn at a time, V vocab.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model.axes import ANYWHERE
from model.execution import Execution
from model.gpt import GPT, Cache, bind

_AT_ONCE = 32  # tokens, C


class Sampling(NamedTuple):
    """How a token is drawn. temperature 0 takes the likeliest."""

    temperature: float = 0.8
    top_k: int | None = None  # among the k likeliest; 0 or less: all
    top_p: float | None = None  # among the likeliest that together reach p


def generate(
    model: GPT,
    params: Any,
    prompt_BP: np.ndarray,
    lengths_B: np.ndarray,
    key: jax.Array,
    num_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    how: Execution,
    cached: NamedSharding | None = None,
) -> Iterator[np.ndarray]:
    """Continue prompts of any lengths, as far as the caller takes what is yielded.

    Args:
        model: abstract.
        params: its parameters.
        prompt_BP: int32, each prompt at the right end of its row; what stands before it
            is not seen.
        lengths_B: int32, of the prompts, at least 1.
        key: random key.
        num_tokens: how many to add to each.
        vocab_size: the tokenizer's; ids beyond it pad the vocabulary, never drawn.
        sampling: how to draw.
        how: execution; its placement rules are left out, a batch may be one row.
        cached: where keys and values [L, B, S, K, H] lie; None: as XLA has it.

    Yields:
        int32 [B, C], the next tokens of each row; the last ones may be fewer.
    """
    how = how._replace(rules=ANYWHERE)
    room = -(-num_tokens // _AT_ONCE) * _AT_ONCE
    cache = _read(model, params, prompt_BP, lengths_B, room, how, cached)
    token_B = prompt_BP[:, -1]
    for step in range(0, room, _AT_ONCE):
        # A CPU's virtual devices deadlock between two programs.
        jax.block_until_ready(cache)
        given = cache, token_B, key, np.int32(step), vocab_size, sampling, how, cached
        cache, drawn_BC = _draw(model, params, *given)
        drawn_BC = jax.device_get(drawn_BC)
        token_B = drawn_BC[:, -1]
        yield drawn_BC[:, : num_tokens - step]


@partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _read(
    model: GPT,
    params: Any,
    prompt_BP: jax.Array,
    lengths_B: jax.Array,
    room: int,
    how: Execution,
    cached: NamedSharding | None,
) -> Cache:
    """Return a cache that holds all columns but the last, and room for more."""
    B, P = prompt_BP.shape
    first_B, model = P - lengths_B, bind(model, params)
    cache = _placed(model.empty_cache(B, P + room, how, first_B), cached)
    if P > 1:
        positions_BP = jnp.maximum(jnp.arange(P - 1) - first_B[:, None], 0)
        read = prompt_BP[:, :-1], positions_BP, None, how, cache
        _, cache, _ = model.features(*read)
    return _placed(cache, cached)


@partial(jax.jit, static_argnums=(0, 6, 7, 8, 9), donate_argnums=2)
def _draw(
    model: GPT,
    params: Any,
    cache: Cache,
    token_B: jax.Array,
    key: jax.Array,
    step: jax.Array,
    vocab_size: int,
    sampling: Sampling,
    how: Execution,
    cached: NamedSharding | None,
) -> tuple[Cache, jax.Array]:
    """Return the longer cache, and the C tokens that follow a column of tokens."""
    model = bind(model, params)

    def next_token(carry, step):
        cache, token_B = carry
        positions_B1 = (cache[0].length[0] - cache[0].first_B[0])[:, None]
        x_B1D, cache, _ = model.features(
            token_B[:, None], positions_B1, None, how, cache
        )
        logits_BV = model.logits(x_B1D, how)[:, 0]
        logits_BV = jnp.where(
            jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV, -jnp.inf
        )
        drawn_B = pick(logits_BV, jax.random.fold_in(key, step), sampling)
        return (_placed(cache, cached), drawn_B), drawn_B

    steps = step + jnp.arange(_AT_ONCE)
    (cache, _), drawn_CB = jax.lax.scan(next_token, (cache, token_B), steps)
    if cached is not None:  # each process reads all
        everywhere = NamedSharding(cached.mesh, PartitionSpec())
        drawn_CB = jax.lax.with_sharding_constraint(drawn_CB, everywhere)
    return cache, drawn_CB.T


def _placed(cache: Cache | None, cached: NamedSharding | None) -> Cache:
    """Pin keys and values to their place."""
    assert cache is not None

    def pin(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, cached)

    if cached is None:
        return cache
    return tuple(c._replace(keys=pin(c.keys), values=pin(c.values)) for c in cache)


def pick(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw an int32 token [B] from float32 logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k > 0:
        k = min(sampling.top_k, logits_BV.shape[-1])
        least = jax.lax.top_k(logits_BV, k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if sampling.top_p is not None:
        ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        weights_BV = jax.nn.softmax(ordered_BV, axis=-1)
        # Keep a token while those before it have not reached p: the first always stays.
        before_BV = jnp.cumsum(weights_BV, axis=-1) - weights_BV
        kept_BV = jnp.where(before_BV < sampling.top_p, ordered_BV, jnp.inf)
        least = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)
