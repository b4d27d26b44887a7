"""A checkpoint is scored on the validation set."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batches import validation_batches
from model.catalog import MODEL_PARTS
from model.gpt import GPT, bind, params_of
from model.placement import ONE_DEVICE
from train.evaluate.validation import evaluate

RULE = ("model.num_layers=1", "data.document_start=true")


@pytest.fixture(scope="module")
def params(programs):
    config = programs(RULE, devices=1).config.model
    return params_of(GPT(config, nnx.Rngs(4), MODEL_PARTS))


def score_of(program, params, store, num_batches):
    params = jax.device_put(params, program.shardings.params)
    return evaluate(program, params, store, num_batches)


@pytest.fixture(scope="module")
def whole(programs, params, store):
    return score_of(programs(RULE, devices=1), params, store, -1)


def test_each_token_is_scored_once(whole, store):
    assert whole.num_targets == store.num_tokens("validation")


def test_the_loss_is_the_mean_over_tokens_and_bits_are_per_byte(
    programs, params, store, whole
):
    """The expected loss is computed row by row in numpy, from the logits."""
    program = programs(RULE, devices=1)
    model = bind(program.model, params)
    execution = program.execution._replace(placement=ONE_DEVICE)

    @jax.jit
    def logits(batch):
        x, *_ = model.features(
            batch.inputs, batch.positions, batch.segment_ids, execution
        )
        return model.logits(x, execution)

    nats = count = 0
    for batch in validation_batches(store, program.config.data):
        values = np.float64(logits(jax.tree.map(jnp.asarray, batch)))
        values -= np.log(np.exp(values).sum(-1, keepdims=True))
        rows, columns = np.nonzero(batch.targets >= 0)
        nats -= values[rows, columns, batch.targets[rows, columns]].sum()
        count += len(rows)
    assert whole.num_targets == count
    assert whole.loss == pytest.approx(nats / count, rel=1e-5)
    # All tokens count, also the ends of documents; the bytes are those of the text.
    bits = nats / math.log(2) / store.num_bytes("validation")
    assert whole.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_only_the_requested_batches_are_scored(programs, params, store, whole):
    score = score_of(programs(RULE, devices=1), params, store, 2)
    batches = list(validation_batches(store, programs(RULE, devices=1).config.data, 2))
    assert len(batches) == 2
    assert score.num_targets == sum((b.targets >= 0).sum() for b in batches)
    assert score.num_targets < whole.num_targets


@pytest.mark.parametrize(
    ("mesh", "count", "parts"),
    [((), 1, 4), (("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), 8, 2)],
    ids=["one device", "mesh"],
)
def test_on_a_mesh_in_microbatches_the_score_is_the_same(
    programs, params, store, whole, mesh, count, parts
):
    """No more than one microbatch passes through the layers at once."""
    overrides = (*RULE, *mesh)
    microbatched = programs(
        [*overrides, f"train.accumulation_steps={parts}"], devices=count
    )
    score = score_of(microbatched, params, store, -1)
    assert score.num_targets == whole.num_targets
    assert score.loss == pytest.approx(whole.loss, rel=1e-6)
    rows = 8 // math.prod(microbatched.mesh.shape[axis] for axis in ("data", "fsdp"))
    for program, expected_rows in (
        (programs(overrides, devices=count), rows),
        (microbatched, rows // parts),
    ):
        step = program.eval_step.lower(program.state.params, program.batch)
        hidden = {
            int(n) for n in re.findall(r"tensor<(\d+)x32x32xf32>", step.as_text())
        }
        assert max(hidden) == expected_rows
