"""The cache does not change generated text, and only permitted tokens are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.catalog import MODEL_PARTS
from model.gpt import GPT, bind, params_of
from model.placement import ONE_DEVICE
from train.sample.generate import Sampling, generate, pick
from train.sample.prompts import make_decoder

PROMPT = np.array([[5, 17, 200, 3], [99, 98, 97, 96]], np.int32)
GREEDY = Sampling(temperature=0)
NUM_IDS = 257  # the vocabulary is padded to 384


@pytest.fixture(scope="module")
def program(programs):
    return programs(["model.num_layers=1", "model.token_shift=both"], devices=1)


@pytest.fixture(scope="module")
def params(program):
    """Return parameters whose largest logits are those of the padding."""
    params = params_of(GPT(program.config.model, nnx.Rngs(3), MODEL_PARTS))
    weight = params["head"]["weight"]
    scale = jnp.where(jnp.arange(384) < NUM_IDS, 1.0, 50.0)
    params["head"]["weight"] = weight * scale
    return params


def continue_prompts(program, params, sampling, seed=0):
    """Return 12 tokens after each prompt; columns of padding precede the prompts."""
    prompts = np.pad(PROMPT, ((0, 0), (3, 0)), constant_values=7)
    decoder = make_decoder(program, NUM_IDS, sampling, 2)
    key = jax.random.key(seed)
    parts = generate(decoder, params, prompts, np.full(2, 4), key, 12)
    return np.concatenate([*parts], axis=1)


@pytest.fixture(scope="module")
def greedy(program, params):
    return continue_prompts(program, params, GREEDY)


def test_greedy_is_the_argmax_of_a_full_forward_at_each_step(program, params, greedy):
    model = bind(program.model, params)
    execution = program.execution._replace(placement=ONE_DEVICE)
    tokens = np.concatenate([PROMPT, greedy], axis=1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def logits(tokens):
        return model.logits(
            model.features(tokens, positions, None, execution)[0], execution
        )

    values = np.asarray(logits(jnp.asarray(tokens)))
    first = PROMPT.shape[1] - 1
    np.testing.assert_array_equal(
        greedy, values[:, first:-1, :NUM_IDS].argmax(-1).astype(np.int32)
    )
    assert (values[:, first:-1].argmax(-1) >= NUM_IDS).any()  # padding would win
    assert greedy.shape == (2, 12)
    assert len(np.unique(greedy)) > 2


def test_padding_is_never_drawn_and_the_seed_decides(program, params):
    hot = Sampling(temperature=5.0)
    texts, repeated, reseeded = (
        continue_prompts(program, params, hot, s) for s in (0, 0, 1)
    )
    assert max(texts.max(), reseeded.max()) < NUM_IDS
    np.testing.assert_array_equal(texts, repeated)
    assert (texts != reseeded).any()
    assert (texts[0] != texts[1]).any()


PROBABILITIES = np.array([0.04, 0.5, 0.16, 0.3])


def draw_frequencies(sampling: Sampling) -> np.ndarray:
    logits = jnp.tile(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)
    ids = np.asarray(pick(logits, keys, sampling))
    return np.bincount(ids, minlength=4) / 4000


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=3), [1, 2, 3]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=0), [0, 1, 2, 3]),
        (Sampling(1.0, top_p=0.7), [1, 3]),
        (Sampling(1.0, top_p=0.45), [1]),
        (Sampling(1.0, top_p=1.0), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=3, top_p=0.6), [1, 3]),
        (Sampling(0), [1]),
    ],
)
def test_permitted_tokens_keep_their_proportions(sampling, kept):
    expected = np.zeros(4)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    frequencies = draw_frequencies(sampling)
    assert set(np.flatnonzero(frequencies)) == set(kept)
    np.testing.assert_allclose(frequencies, expected, atol=0.03)


def test_temperature_sharpens():
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(draw_frequencies(Sampling(0.5)), expected, atol=0.03)
