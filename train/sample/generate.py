"""Text from a model: one prefill, then a token at a time with a cache of keys.

Shapes: B samples, P tokens of the longest prompt, T tokens from `shared` on, V vocab.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model.axes import ANYWHERE
from model.execution import Execution
from model.gpt import GPT, bind


class Sampling(NamedTuple):
    """How a token is drawn. temperature 0 takes the likeliest."""

    temperature: float = 0.8
    top_k: int | None = None  # among the k likeliest
    top_p: float | None = None  # among the likeliest that together reach p


@partial(jax.jit, static_argnums=(0, 5, 6, 7, 8, 9))
def generate(
    model: GPT,
    params: Any,
    prompt_BP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    shared: int,
    num_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    how: Execution,
) -> jax.Array:
    """Continue prompts of any lengths.

    The first `shared` tokens of all are read at once; then each row goes on a token at
    a time: with its prompt's as long as there are any, then with what it draws.

    Args:
        model: abstract.
        params: its parameters.
        prompt_BP: int32; what follows a shorter prompt is not read.
        lengths_B: int32, of the prompts.
        key: random key.
        shared: at least 1, at most the shortest prompt.
        num_tokens: how many to add to the longest.
        vocab_size: the tokenizer's; ids beyond it pad the vocabulary, never drawn.
        sampling: how to draw.
        how: execution; its placement rules are left out, a batch may be one row.

    Returns:
        int32 [B, P - shared + num_tokens]: the tokens from `shared` on, so row b has
        its own from lengths_B[b] - shared on.
    """
    how = how._replace(rules=ANYWHERE)
    model = bind(model, params)
    B, P = prompt_BP.shape

    def draw(cache, tokens_BT, start, step):
        T = tokens_BT.shape[1]
        positions_BT = jnp.broadcast_to(start + jnp.arange(T), (B, T))
        x_BTD, cache, _ = model.features(tokens_BT, positions_BT, None, how, cache)
        logits_BV = model.logits(x_BTD[:, -1:], how)[:, 0]
        logits_BV = jnp.where(
            jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV, -jnp.inf
        )
        drawn_B = pick(logits_BV, jax.random.fold_in(key, step), sampling)
        own_B = prompt_BP[:, jnp.minimum(shared + step, P - 1)]
        return cache, jnp.where(shared + step < lengths_B, own_B, drawn_B)

    cache = model.empty_cache(B, P + num_tokens, how)
    cache, first_B = draw(cache, prompt_BP[:, :shared], 0, 0)

    def next_token(carry, step):
        cache, token_B = carry
        cache, following_B = draw(cache, token_B[:, None], shared + step - 1, step)
        return (cache, following_B), following_B

    steps = jnp.arange(1, P - shared + num_tokens)
    _, rest_TB = jax.lax.scan(next_token, (cache, first_B), steps)
    return jnp.concatenate([first_B[:, None], rest_TB.T], axis=1)


def pick(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw an int32 token [B] from float32 logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
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
