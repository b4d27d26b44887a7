"""Multi-token prediction equals a loop over the positions of single documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batch import Batch
from data.batches import Order
from model.catalog import MODEL_PARTS
from model.execution import CallContext
from model.gpt import GPT, bind, params_of
from model.rope import make_rotations
from tests.train.conftest import distance, take_steps
from train.core.loss.ahead import look_ahead
from train.core.step import make_gradients
from train.resolve.program import recipe_of

DEPTH = 2
KEYS = (f"model.predict_ahead={DEPTH}", "data.batch_size=2", "model.embed_dim=16")


@pytest.fixture(scope="module")
def program(programs):
    return programs(KEYS)


@pytest.fixture(scope="module")
def params(program):
    """Make weights of which none is zero or one, so that every norm and bias counts."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: w + 0.3 * rng.normal(size=w.shape).astype(np.float32),
        params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS)),
    )


def documents(batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the inputs and targets of each document of a batch."""
    parts = []
    for inputs, targets, ids in zip(
        batch.inputs, batch.targets, batch.segment_ids, strict=True
    ):
        parts += [(inputs[ids == i], targets[ids == i]) for i in np.unique(ids) if i]
    return parts


def total_loss(program, params, batch: Batch):
    """Return the loss of each document alone, position by position, and its parts."""
    model = bind(program.model, params)
    execution = program.execution
    sums = [0.0] * (1 + DEPTH)
    counts = [0] * (1 + DEPTH)
    for inputs, targets in documents(batch):
        T = len(inputs)
        positions = jnp.arange(T)[None]
        rotations = make_rotations(positions, model.config)
        call = CallContext(positions_BT=positions, rotations=rotations)
        h, _, _ = model.features(jnp.asarray(inputs)[None], positions, None, execution)
        for k in range(1 + DEPTH):
            if k:
                tokens = np.append(inputs[k:], [0] * min(k, T))
                table = model.embedding.weight[...]
                embedding = table[tokens][None]
                h, _ = model.predict_ahead[str(k - 1)](h, embedding, execution, call)
            logp = jax.nn.log_softmax(model.logits(h, execution))[0]
            for i in range(T - k):
                if targets[i + k] >= 0:
                    sums[k] -= logp[i, targets[i + k]]
                    counts[k] += 1
    losses = [sum / count for sum, count in zip(sums, counts, strict=True)]
    weight = program.config.train.predict_ahead_weight
    return losses[0] + weight / DEPTH * sum(losses[1:]), losses


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_documents_alone(program, params, store):
    batches = map(Order(store, program.config.data, 0).read, range(10))
    batch = next(b for b in batches if (b.segment_ids.max(axis=1) > 1).any())
    step = make_gradients(program.model, program.execution, program.recipe)
    result = jax.jit(step)(params, jax.tree.map(jnp.asarray, batch))
    loss = jax.value_and_grad(lambda p: total_loss(program, p, batch), has_aux=True)
    (_, expected), grads = jax.jit(loss)(params)
    np.testing.assert_allclose(result.losses, expected, rtol=1e-5)
    assert distance(result.grads, grads) < 1e-5
    assert min(map(float, result.losses)) > 1


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_modules_read_the_targets_of_a_document_one_after_the_other(
    configure, store, packing
):
    """The first module's first input is a document's first token."""
    keys = ("data.document_start=true", f"data.packing={packing}")
    order = Order(store, configure(keys).data, 0)
    for step in range(5):
        batch = jax.tree.map(jnp.asarray, order.read(step))
        ahead = look_ahead(batch.inputs, batch.targets, batch.segment_ids, DEPTH)
        for k in range(DEPTH):
            tokens = ahead.tokens_BTP[..., k]
            targets = ahead.targets_BTP[..., k]
            is_read = np.asarray((tokens >= 0) & (batch.segment_ids > 0))
            rows, columns = np.nonzero(is_read)
            assert len(rows)
            expected = np.asarray(batch.targets)[rows, columns + k]
            np.testing.assert_array_equal(np.asarray(tokens)[is_read], expected)
            # A module predicts a token wherever it reads one.
            np.testing.assert_array_equal(is_read, np.asarray(targets >= 0))


def test_the_metric_is_the_mean_loss_of_the_modules(program, store):
    _, metrics = take_steps(program, store, program.init(), 10)
    first, last = (metrics[i]["ahead_loss"] for i in (0, -1))
    assert 0 < last < first - 0.1


def test_the_weight_changes_at_its_step(configure):
    keys = ("train.predict_ahead_later_weight=0.1", "train.predict_ahead_later_step=3")
    recipe = recipe_of(configure(keys).train)
    assert [float(recipe.ahead_weight(step)) for step in (0, 2, 3, 9)] == (
        pytest.approx([0.3, 0.3, 0.1, 0.1])
    )
    constant = recipe_of(configure().train)
    assert float(constant.ahead_weight(9)) == pytest.approx(0.3)
