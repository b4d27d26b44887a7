"""Generate text: read prompts in one pass, and then draw tokens one by one.

Prompts are right-aligned in their rows, so that prompts of all lengths draw their
tokens in the same steps. One program is compiled for each shape [B, P] of prompts.

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


class Decoder(NamedTuple):
    """A model and its settings for continuing prompts, all static under `jit`.

    execution: its placement is ignored, because a batch may have a single row.
    vocab_size: the size of the tokenizer. Ids from this size on only pad the
        vocabulary and are never drawn.
    trained_length: the row length in training. A query sees at most this number of
        keys, the newest ones.
    cache_sharding: the sharding of keys and values [L, B, S, K, H], or latents
        [L, B, S, C].
    """

    model: GPT
    execution: Execution
    vocab_size: int
    sampling: Sampling
    trained_length: int
    cache_sharding: NamedSharding

    def features(
        self, model: GPT, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Return the features of tokens, and the layers' caches with their keys."""
        x_BTD, new_cache, _ = model.features(
            tokens_BT,
            positions_BT,
            segment_ids_BT=None,
            execution=self.execution._replace(placement=ONE_DEVICE),
            cache=cache,
            call=CallContext(trained_length=self.trained_length),
        )
        assert new_cache is not None
        return x_BTD, self.constrain(new_cache)

    def pick(self, model: GPT, x_BD: jax.Array, keys_B: jax.Array) -> jax.Array:
        """Draw the int32 tokens [B] that follow positions with the features x_BD."""
        execution = self.execution._replace(placement=ONE_DEVICE)
        logits_BV = model.logits(x_BD[:, None], execution)[:, 0]
        is_token_V = jnp.arange(logits_BV.shape[-1]) < self.vocab_size
        logits_BV = jnp.where(is_token_V, logits_BV, -jnp.inf)
        return pick(logits_BV, keys_B, self.sampling)

    def constrain(self, cache: Cache) -> Cache:
        """Constrain the sharding of arrays that have positions. XLA shards states."""

        def constrain(x: jax.Array) -> jax.Array:
            if x.ndim <= 2:  # lengths and first positions
                return x
            return jax.lax.with_sharding_constraint(x, self.cache_sharding)

        return tuple(
            c._replace(mixer=jax.tree.map(constrain, c.mixer))
            if c.mixer.has_positions
            else c
            for c in cache
        )


def generate(
    decoder: Decoder,
    params: Any,
    prompt_BP: np.ndarray,
    lengths_B: np.ndarray,
    key: jax.Array,
    num_tokens: int,
) -> Iterator[np.ndarray]:
    """Continue prompts of any lengths until the caller stops taking tokens.

    Args:
        decoder: the model and the settings.
        params: the model's parameters.
        prompt_BP: int32, each prompt at the right end of its row. The columns to its
            left are ignored.
        lengths_B: int32 lengths of the prompts, at least 1.
        key: random key.
        num_tokens: the number of tokens to add to each prompt.

    Yields:
        int32 [B, C], the next tokens of each row. The last array may be narrower.
    """
    num_new = -(-num_tokens // _TOKENS_PER_CALL) * _TOKENS_PER_CALL
    cache = prefill(decoder, params, prompt_BP, lengths_B, num_new)
    token_B = prompt_BP[:, -1]
    for step in range(0, num_new, _TOKENS_PER_CALL):
        # Virtual devices of a CPU deadlock if two programs run at once.
        jax.block_until_ready(cache)
        steps = np.arange(step, step + _TOKENS_PER_CALL, dtype=np.int32)
        cache, drawn_BC = _draw(decoder, params, cache, token_B, key=key, steps=steps)
        drawn_BC = jax.device_get(drawn_BC)
        token_B = drawn_BC[:, -1]
        yield drawn_BC[:, : num_tokens - step]


@partial(jax.jit, static_argnums=(0, 4))
def prefill(
    decoder: Decoder,
    params: Any,
    prompt_BP: jax.Array,
    lengths_B: jax.Array,
    num_new: int,
) -> Cache:
    """Return a cache of all columns but the last, with room for `num_new` tokens."""
    B, P = prompt_BP.shape
    first_B = P - lengths_B
    model = bind(decoder.model, params)
    execution = decoder.execution._replace(placement=ONE_DEVICE)
    cache = model.empty_cache(B, P + num_new, execution, first_B)
    cache = decoder.constrain(cache)
    if P > 1:
        positions_BP = jnp.maximum(jnp.arange(P - 1) - first_B[:, None], 0)
        _, cache = decoder.features(model, prompt_BP[:, :-1], positions_BP, cache)
    return cache


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _draw(
    decoder: Decoder,
    params: Any,
    cache: Cache,
    token_B: jax.Array,
    key: jax.Array,
    steps: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Return the extended cache and the next C tokens of each row."""
    model = bind(decoder.model, params)

    def next_token(carry, step):
        cache, token_B = carry
        positions_B1 = (cache[0].length[0] - cache[0].first_B[0])[:, None]
        x_B1D, cache = decoder.features(model, token_B[:, None], positions_B1, cache)
        keys_B = _draw_keys(key, step, len(token_B))
        drawn_B = decoder.pick(model, x_B1D[:, 0], keys_B)
        return (cache, drawn_B), drawn_B

    (cache, _), drawn_CB = jax.lax.scan(next_token, (cache, token_B), steps)
    # Replicate the tokens, because every process reads all of them.
    replicated = NamedSharding(decoder.cache_sharding.mesh, PartitionSpec())
    return cache, jax.lax.with_sharding_constraint(drawn_CB, replicated).T


def _draw_keys(key: jax.Array, step: jax.Array, num_rows: int) -> jax.Array:
    """Return the random key [B] of each row's draw number `step`."""
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))
    return jax.vmap(jax.random.fold_in, (0, None))(row_keys_B, step)


def pick(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw an int32 token [B] from float32 logits, each row with its key."""
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
        # A token may be drawn if the total probability of more likely tokens is below
        # p. The most likely token may always be drawn.
        total_before_BV = jnp.cumsum(weights_BV, axis=-1) - weights_BV
        kept_BV = jnp.where(total_before_BV < sampling.top_p, ordered_BV, jnp.inf)
        smallest_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < smallest_B1, -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
