"""Generation: prompts are read in one pass, and then tokens are drawn one by one.

A prompt is at the right end of its row, so that prompts of all lengths end in the same
column and draw their tokens in the same steps. One program is compiled for each number
of columns and rows.

Shapes: B samples, P columns of prompts, C tokens of one call, V vocab.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model.execution import CallContext, Execution
from model.gpt import GPT, Cache, bind
from model.placement import ONE_DEVICE

_TOKENS_PER_CALL = 32  # C


class Sampling(NamedTuple):
    """How a token is drawn.

    temperature: divides the logits; 0 takes the most likely token.
    top_k: draw from the k most likely tokens only. None and numbers below 1 mean all.
    top_p: draw from the most likely tokens that together reach this probability.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None


def generate(
    model: GPT,
    params: Any,
    prompt_BP: np.ndarray,
    lengths_B: np.ndarray,
    key: jax.Array,
    num_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    execution: Execution,
    trained_length: int | None = None,
    cache_sharding: NamedSharding | None = None,
) -> Iterator[np.ndarray]:
    """Continue prompts of any lengths until the caller stops taking tokens.

    Args:
        model: the abstract model.
        params: its parameters.
        prompt_BP: int32, each prompt at the right end of its row. Columns before it are
            ignored.
        lengths_B: int32 lengths of the prompts, at least 1.
        key: random key.
        num_tokens: the number of tokens to add to each prompt.
        vocab_size: the size of the tokenizer. Ids from it on only pad the vocabulary
            and are never drawn.
        sampling: how to draw.
        execution: its placement is ignored, because a batch may be one row.
        trained_length: the number of newest keys that a query sees. None means all.
        cache_sharding: of keys and values [L, B, S, K, H]. None leaves it to XLA.

    Yields:
        int32 [B, C], the next tokens of each row. The last ones may be fewer.
    """
    execution = execution._replace(placement=ONE_DEVICE)
    call = CallContext(trained_length=trained_length)
    room = -(-num_tokens // _TOKENS_PER_CALL) * _TOKENS_PER_CALL
    cache = _read(
        model,
        params,
        prompt_BP=prompt_BP,
        lengths_B=lengths_B,
        room=room,
        execution=execution,
        call=call,
        cache_sharding=cache_sharding,
    )
    token_B = prompt_BP[:, -1]
    for step in range(0, room, _TOKENS_PER_CALL):
        # Virtual devices of a CPU deadlock if two programs run at once.
        jax.block_until_ready(cache)
        cache, drawn_BC = _draw(
            model,
            params,
            cache=cache,
            token_B=token_B,
            key=key,
            step=np.int32(step),
            vocab_size=vocab_size,
            sampling=sampling,
            execution=execution,
            call=call,
            cache_sharding=cache_sharding,
        )
        drawn_BC = jax.device_get(drawn_BC)
        token_B = drawn_BC[:, -1]
        yield drawn_BC[:, : num_tokens - step]


@partial(jax.jit, static_argnums=(0, 4, 5, 6, 7))
def _read(
    model: GPT,
    params: Any,
    prompt_BP: jax.Array,
    lengths_B: jax.Array,
    room: int,
    execution: Execution,
    call: CallContext,
    cache_sharding: NamedSharding | None,
) -> Cache:
    """Return a cache that holds all columns but the last one and has room for more."""
    B, P = prompt_BP.shape
    first_B, model = P - lengths_B, bind(model, params)
    cache = model.empty_cache(B, P + room, execution, first_B)
    cache = _constrain(cache, cache_sharding)
    if P > 1:
        positions_BP = jnp.maximum(jnp.arange(P - 1) - first_B[:, None], 0)
        _, cache, _ = model.features(
            prompt_BP[:, :-1],
            positions_BP,
            segment_ids_BT=None,
            execution=execution,
            cache=cache,
            call=call,
        )
    return _constrain(cache, cache_sharding)


@partial(jax.jit, static_argnums=(0, 6, 7, 8, 9, 10), donate_argnums=2)
def _draw(
    model: GPT,
    params: Any,
    cache: Cache,
    token_B: jax.Array,
    key: jax.Array,
    step: jax.Array,
    vocab_size: int,
    sampling: Sampling,
    execution: Execution,
    call: CallContext,
    cache_sharding: NamedSharding | None,
) -> tuple[Cache, jax.Array]:
    """Return the longer cache and the next C tokens of each row."""
    model = bind(model, params)

    def next_token(carry, step):
        cache, token_B = carry
        positions_B1 = (cache[0].length[0] - cache[0].first_B[0])[:, None]
        x_B1D, cache, _ = model.features(
            token_B[:, None],
            positions_B1,
            segment_ids_BT=None,
            execution=execution,
            cache=cache,
            call=call,
        )
        logits_BV = model.logits(x_B1D, execution)[:, 0]
        logits_BV = jnp.where(
            jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV, -jnp.inf
        )
        drawn_B = pick(logits_BV, jax.random.fold_in(key, step), sampling)
        return (_constrain(cache, cache_sharding), drawn_B), drawn_B

    steps = step + jnp.arange(_TOKENS_PER_CALL)
    (cache, _), drawn_CB = jax.lax.scan(next_token, (cache, token_B), steps)
    if cache_sharding is not None:  # Every process reads all tokens.
        replicated = NamedSharding(cache_sharding.mesh, PartitionSpec())
        drawn_CB = jax.lax.with_sharding_constraint(drawn_CB, replicated)
    return cache, drawn_CB.T


def _constrain(cache: Cache | None, sharding: NamedSharding | None) -> Cache:
    """Constrain the sharding of keys and values."""
    assert cache is not None
    if sharding is None:
        return cache

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    return tuple(
        c._replace(keys=constrain(c.keys), values=constrain(c.values)) for c in cache
    )


def pick(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw an int32 token [B] from float32 logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k > 0:
        k = min(sampling.top_k, logits_BV.shape[-1])
        smallest_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < smallest_B1, -jnp.inf, logits_BV)
    if sampling.top_p is not None:
        ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        weights_BV = jax.nn.softmax(ordered_BV, axis=-1)
        # A token stays if the tokens before it have not reached p. The first one always
        # stays.
        before_BV = jnp.cumsum(weights_BV, axis=-1) - weights_BV
        staying_BV = jnp.where(before_BV < sampling.top_p, ordered_BV, jnp.inf)
        smallest_B1 = jnp.min(staying_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < smallest_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)
