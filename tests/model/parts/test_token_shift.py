"""A shifted channel is that of the previous position of the same document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.catalog import MODEL_PARTS
from model.execution import CallContext, Execution
from model.gpt import abstract_gpt, bind
from model.parts.token_shift import shift_channels
from tests.model.conftest import MODELS

pytestmark = pytest.mark.usefixtures("strict")
LENGTHS = (3, 1, 4)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])[None]
DOCUMENTS = np.repeat([1, 2, 3], LENGTHS)[None]


def test_a_quarter_of_the_channels_moves_inside_documents():
    x = jnp.arange(1.0, 65).reshape(1, 8, 8)
    call = CallContext(positions_BT=jnp.asarray(POSITIONS))
    shifted, _ = shift_channels(x, None, Execution(), call)
    np.testing.assert_array_equal(shifted[..., 2:], x[..., 2:])
    for t, position in enumerate(POSITIONS[0]):
        expected = x[0, t - 1, :2] if position else jnp.zeros(2)
        np.testing.assert_array_equal(shifted[0, t, :2], expected)


@pytest.mark.slow
def test_gradients_of_packed_documents_are_those_of_each_alone():
    tiny = MODELS["nano"]
    tokens = tiny.tokens(1, 8)
    weights = np.linspace(1, 2, 8)[None, :, None]

    def gradients(columns, documents):
        def loss(params):
            logits = tiny.logits(
                params, tokens[:, columns], POSITIONS[:, columns], documents
            )
            return jnp.sum(weights[:, columns].astype(np.float32) * jnp.sin(logits))

        return jax.grad(loss)(tiny.params)

    packed = gradients(np.arange(8), jnp.asarray(DOCUMENTS))
    grads_by_document = [
        gradients(np.flatnonzero(DOCUMENTS[0] == n), None) for n in (1, 2, 3)
    ]
    expected = jax.tree.map(lambda *grads: sum(grads), *grads_by_document)
    for grad, expected_grad in zip(
        *map(jax.tree.leaves, (packed, expected)), strict=True
    ):
        np.testing.assert_allclose(
            grad, expected_grad, atol=1e-5 * np.abs(expected_grad).max()
        )


def test_prompts_of_all_lengths_are_cached_in_several_calls():
    """Rows begin at columns 0, 3 and 4, of which the last is in the second call."""
    tiny = MODELS["nano"]
    length = 8
    tokens = tiny.tokens(3, length)
    first_B = jnp.array([0, 3, 4])
    positions = jnp.maximum(jnp.arange(length)[None] - first_B[:, None], 0)

    @jax.jit
    def extend(cache, tokens, positions):
        model = bind(tiny.model, tiny.params)
        x, cache, _ = model.features(tokens, positions, None, tiny.execution, cache)
        return model.logits(x, tiny.execution), cache

    cache = abstract_gpt(tiny.config, MODEL_PARTS).empty_cache(
        3, length, tiny.execution, first_B
    )
    logits_by_call = []
    for call in (slice(0, 4), slice(4, 7), slice(7, 8)):
        logits, cache = extend(cache, tokens[:, call], positions[:, call])
        logits_by_call.append(logits)
    actual = np.concatenate(logits_by_call, axis=1)
    for row, first in enumerate(first_B.tolist()):
        prompt = tokens[row : row + 1, first:]
        steps = np.arange(length - first)[None]
        expected = tiny.logits(tiny.params, prompt, steps, None)[0]
        np.testing.assert_allclose(actual[row, first:], expected, atol=5e-6)
