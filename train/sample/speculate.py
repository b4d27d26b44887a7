"""Speculation: a prediction module drafts a token, and the model verifies it.

A forward pass reads two tokens of each row: the last drawn token, and the draft of the
next one. The model draws a token after each of them. If the first draw equals the
draft, the second draw counts too. Otherwise the row's cache forgets the draft.

Every token is therefore the model's own draw. Its random key depends only on the row
and the number of the draw, so the tokens equal those without speculation, at any
temperature. Drafts are drawn with the same key, which makes equal draws likely. Logits
may round differently in a pass over two tokens than in a pass over one. A draw between
two almost equally likely tokens may then differ.

Shapes: B samples, C tokens of one call of `_draw`, D embed, 2 the last token and draft.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model.attention.cache import LayerCache
from model.choices import Mixer, TokenShift
from model.config import ModelConfig
from model.gpt import GPT, Cache, bind
from train.errors import Mistake
from train.sample.generate import TOKENS_PER_CALL, Decoder, draw_keys, prefill


@dataclass
class DraftCount:
    """The number of drafts that were verified, and how many of them were accepted."""

    verified: int = 0
    accepted: int = 0


class _Rows(NamedTuple):
    """The values that the loop of a call carries from one forward pass to the next.

    token_B, draft_B: the last drawn token, and the draft of the next one.
    count_B: the number of tokens drawn in this call; a row is done at C.
    drawn_BC: these tokens. A row's entries from count_B on have no meaning.
    """

    cache: Cache
    token_B: jax.Array
    draft_B: jax.Array
    count_B: jax.Array
    drawn_BC: jax.Array
    verified: jax.Array
    accepted: jax.Array


def speculation_mistakes(model: ModelConfig) -> list[Mistake]:
    """Return a mistake if a model cannot draft tokens, or cannot take one back."""
    if not model.predict_ahead:
        rule = "needs a model that was trained with model.predict_ahead"
    elif Mixer.gated_delta in model.mixers:
        rule = "needs a model without gated delta nets, to take back rejected drafts"
    elif model.token_shift is not TokenShift.none:
        rule = "needs a model with model.token_shift=none, to take back rejected drafts"
    else:
        return []
    return [Mistake("speculate", True, f"{rule}; leave out speculate=true")]


def generate_ahead(
    decoder: Decoder,
    params: Any,
    prompt_BP: np.ndarray,
    lengths_B: np.ndarray,
    key: jax.Array,
    num_tokens: int,
    drafts: DraftCount,
) -> Iterator[np.ndarray]:
    """Continue prompts like `generate`, and count the drafts in `drafts`.

    The decoder must have `speculates=True`. Rows advance independently within a call.
    """
    num_new = -(-num_tokens // TOKENS_PER_CALL) * TOKENS_PER_CALL
    cache = prefill(decoder, params, prompt_BP, lengths_B, num_new)
    token_B, draft_B = prompt_BP[:, -1], np.zeros(len(prompt_BP), np.int32)
    for step in range(0, num_new, TOKENS_PER_CALL):
        # Virtual devices of a CPU deadlock if two programs run at once.
        jax.block_until_ready(cache)
        cache, *results = _draw(
            decoder, params, cache, token_B, draft_B, key=key, step=np.int32(step)
        )
        drawn_BC, draft_B, verified, accepted = jax.device_get(results)
        token_B = drawn_BC[:, -1]
        drafts.verified += int(verified)
        drafts.accepted += int(accepted)
        yield drawn_BC[:, : num_tokens - step]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _draw(
    decoder: Decoder,
    params: Any,
    cache: Cache,
    token_B: jax.Array,
    draft_B: jax.Array,
    key: jax.Array,
    step: jax.Array,
) -> tuple[Cache, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the extended cache, the next C tokens, the next draft and the counts."""
    model, C = bind(decoder.model, params), TOKENS_PER_CALL
    length, first_LB = cache[0].length[0], cache[0].first_B
    assert first_LB is not None

    def run_pass(rows: _Rows) -> _Rows:
        length_B, step_B = length + rows.count_B, step + rows.count_B
        rows = rows._replace(cache=_truncate(rows.cache, length_B))
        position_B = length_B - first_LB[0]
        return _verify(decoder, model, rows, position_B, step_B=step_B, key=key)

    count_B = jnp.zeros_like(token_B)
    start = _Rows(
        cache=_truncate(cache, length + count_B),
        token_B=token_B,
        draft_B=draft_B,
        count_B=count_B,
        drawn_BC=jnp.zeros((len(token_B), C), jnp.int32),
        verified=jnp.int32(0),
        accepted=jnp.int32(0),
    )
    rows = jax.lax.while_loop(lambda rows: jnp.min(rows.count_B) < C, run_pass, start)
    # Replicate the results, because every process reads all of them.
    replicated = NamedSharding(decoder.cache_sharding.mesh, PartitionSpec())
    results = rows.drawn_BC, rows.draft_B, rows.verified, rows.accepted
    results = jax.lax.with_sharding_constraint(results, replicated)
    return _truncate(rows.cache, length + C), *results


def _verify(
    decoder: Decoder,
    model: GPT,
    rows: _Rows,
    position_B: jax.Array,
    step_B: jax.Array,
    key: jax.Array,
) -> _Rows:
    """Add draw number step_B, and the next one if the draft is right. Draft again."""
    tokens_B2 = jnp.stack([rows.token_B, rows.draft_B], axis=1)
    positions_B2 = position_B[:, None] + jnp.arange(2)
    x_B2D, cache = decoder.features(model, tokens_B2, positions_B2, rows.cache)
    pick = partial(decoder.pick, model)
    draws = [pick(x_B2D[:, i], draw_keys(key, step_B + i)) for i in (0, 1)]
    drawn_B2 = jnp.stack(draws, axis=1)
    is_right_B = rows.draft_B == drawn_B2[:, 0]
    # A row that is done repeats its last pass, and adds nothing.
    added_B = jnp.minimum(1 + is_right_B, TOKENS_PER_CALL - rows.count_B)
    is_active_B = added_B > 0

    h_B2D, draft_cache = decoder.draft(model, x_B2D, drawn_B2, positions_B2, rows.cache)
    last_B1 = jnp.maximum(added_B - 1, 0)[:, None]  # the last draw that counts
    h_BD = jnp.take_along_axis(h_B2D, last_B1[..., None], axis=1)[:, 0]
    draft_B = pick(h_BD, draw_keys(key, step_B + added_B))
    token_B = jnp.take_along_axis(drawn_B2, last_B1, axis=1)[:, 0]
    offset_BC = jnp.arange(TOKENS_PER_CALL) - rows.count_B[:, None]
    drawn_BC = jnp.where(offset_BC == 0, drawn_B2[:, :1], rows.drawn_BC)
    return _Rows(
        cache=cache + draft_cache,
        token_B=jnp.where(is_active_B, token_B, rows.token_B),
        draft_B=jnp.where(is_active_B, draft_B, rows.draft_B),
        count_B=rows.count_B + added_B,
        drawn_BC=jnp.where(offset_BC == 1, drawn_B2[:, 1:], drawn_BC),
        verified=rows.verified + jnp.sum(is_active_B),
        accepted=rows.accepted + jnp.sum(is_active_B & is_right_B),
    )


def _truncate(cache: Cache, length: jax.Array) -> Cache:
    """Keep the first `length` positions, [] or [B], of the cache of every layer."""

    def replace(c: LayerCache) -> LayerCache:
        lengths = jnp.broadcast_to(length, (len(c.length), *length.shape))
        return c._replace(mixer=c.mixer._replace(length=lengths))

    return tuple(map(replace, cache))
