"""Speculation draws the tokens that are drawn without it, whatever rows accept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batch import Batch
from model.gpt import bind
from model.parts.predict_ahead import look_ahead
from model.placement import ONE_DEVICE
from train.core.feed import place
from train.sample.generate import Sampling, generate
from train.sample.prompts import make_decoder
from train.sample.speculate import DraftCount, generate_ahead, speculation_mistakes

KEYS = (
    *("model.predict_ahead=1", "train.predict_ahead_weight=1", "data.batch_size=4"),
    *("optimizer.learning_rate=0.02", "data.sequence_length=48"),
    "model.token_shift=none",
)
LATENT = (
    *("model.mixer=latent_attention", "model.query_rank=16", "model.kv_rank=16"),
    *("model.nope_head_dim=8", "model.rope_head_dim=8", "model.value_head_dim=8"),
)
MODELS = {"attention": (), "latent attention": LATENT}
NUM_IDS = 257
LENGTHS = np.array([9, 1, 4], np.int32)
PROMPT = np.random.default_rng(0).integers(0, 9, (3, 9)).astype(np.int32)


@pytest.fixture(scope="module", params=MODELS)
def model(request, programs):
    """A program, and parameters that a few steps on periodic rows have trained."""
    program = programs(*MODELS[request.param], *KEYS, devices=1)
    rows = np.stack([np.resize(np.arange(1, 4 + row), 49) for row in range(4)])
    inputs, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
    positions = np.broadcast_to(np.arange(48, dtype=np.int32), inputs.shape)
    batch = Batch(inputs, targets, np.ones_like(inputs), positions)
    state = program.init()
    for _ in range(6):
        state, _ = program.train_step(state, place(batch, program.batch))
    return program, state.params


def draw(model, sampling, num_tokens, drafts=None):
    """Return the tokens after prompts of several lengths."""
    program, params = model
    decoder, step = make_decoder(program, NUM_IDS, sampling, 3), generate
    if drafts is not None:
        decoder = decoder._replace(speculates=True)
        step = partial(generate_ahead, drafts=drafts)
    parts = step(decoder, params, PROMPT, LENGTHS, jax.random.key(7), num_tokens)
    return np.concatenate([*parts], axis=1)


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(0.7), Sampling(1.2, top_k=9, top_p=0.8)]
)
def test_the_tokens_are_those_without_speculation(model, sampling):
    drafts = DraftCount()
    found = draw(model, sampling, 40, drafts)
    assert found.shape == (3, 40)
    np.testing.assert_array_equal(found, draw(model, sampling, 40))
    assert 0.05 < drafts.accepted / drafts.verified < 0.97, drafts


def test_drafts_are_those_of_the_module_over_the_whole_text(model):
    """The cache of the module forgets what the cache of the model forgets.

    The weights of the module are noisy, so that its drafts depend on all positions.
    """
    program, params = model
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: x + 0.4 * rng.normal(size=x.shape).astype(np.float32),
        params["predict_ahead"],
    )
    params = params | {"predict_ahead": noisy}
    drafts = DraftCount()
    drawn = draw((program, params), Sampling(0), 32, drafts)
    text = np.zeros((3, 41), np.int32)
    for row, n in enumerate(LENGTHS):
        text[row, : n + 32] = np.append(PROMPT[row, -n:], drawn[row])
    execution = program.execution._replace(placement=ONE_DEVICE)
    positions = jnp.broadcast_to(jnp.arange(41), text.shape)

    @jax.jit
    def predict(text):
        gpt, ahead = bind(program.model, params), look_ahead(text, text, None, 1)
        x, *_ = gpt.features(text, positions, None, execution)
        (x,), _ = gpt.features_ahead(x, ahead, positions, None, execution)
        return gpt.logits(x, execution)[..., :NUM_IDS].argmax(-1)

    predicted, expected = np.asarray(predict(text)), DraftCount()
    for row, n in enumerate(LENGTHS):
        count, draft = 0, 0
        while count < 32:
            is_right = draft == drawn[row, count]
            expected.verified += 1
            expected.accepted += is_right
            count = min(count + 1 + is_right, 32)
            draft = predicted[row, n + count - 2]
    assert drafts == expected
    assert 0 < drafts.accepted < drafts.verified


def test_a_model_that_cannot_speculate_is_refused(composed):
    unshifted = "model.token_shift=none"
    for overrides, reason in (
        ((), "trained with model.predict_ahead"),
        (("model.predict_ahead=1", "model.mixer=gated_delta"), "gated delta"),
        (("model.predict_ahead=1", "model.token_shift=mlp"), "token_shift"),
    ):
        (mistake,) = speculation_mistakes(composed(unshifted, *overrides).model)
        assert mistake.key == "speculate"
        assert reason in mistake.rule
    assert not speculation_mistakes(composed(unshifted, "model.predict_ahead=1").model)
