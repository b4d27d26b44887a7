"""The loss is the same sum in tiles or whole, sharded or not."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from data.batch import Batch
from data.batches import Order
from model.catalog import MODEL_PARTS
from model.gpt import GPT, bind, params_of
from model.placement import ONE_DEVICE
from train.core.loss.loss import loss_sum
from train.core.loss.token_loss import CrossEntropy
from train.core.rows import (
    REPLICATED,
    reduce_over_replicas,
    run_per_device,
    sum_over_rows,
)
from train.core.step import make_gradients
from train.resolve.program import make_program


@pytest.fixture(scope="module")
def program(programs):
    return programs(["model.num_layers=1"], devices=1)


@pytest.fixture(scope="module")
def params(program):
    return params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))


@pytest.fixture(scope="module")
def batch(program, store) -> Batch:
    first_batch = Order(store, program.config.data, 0).read(0)
    assert (first_batch.targets < 0).any()  # Some documents end.
    return jax.tree.map(jnp.asarray, first_batch)


JITTED = {}


def value_and_grads(program, params, batch, chunk):
    execution = program.execution

    def local_value_and_grads(params, batch):
        def loss(params):
            model = bind(program.model, params)
            sums = loss_sum(model, batch, execution, CrossEntropy(0.1), chunk)
            return sums.losses[0], sums.nats[0]

        sums, grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sum_over_rows(sums, execution.placement), reduce_over_replicas(
            grads, program.infos, execution
        )

    key = (program.mesh, program.execution, program.config.model, chunk)
    if key not in JITTED:
        per_device = run_per_device(
            local_value_and_grads,
            program.execution,
            program.infos,
            lambda specs: (REPLICATED, specs),
        )
        JITTED[key] = jax.jit(per_device)
    params = jax.device_put(params, program.shardings.params)
    batch = jax.device_put(batch, program.batch_shardings)
    return jax.device_get(JITTED[key](params, batch))


def assert_close(a, b):
    """Check the error of each array, relative to the norm of the expected array."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) <= 2e-5 * np.linalg.norm(y)


def logits_of(model, params, batch, execution) -> np.ndarray:
    @jax.jit
    def logits(params):
        bound = bind(model, params)
        x_BTD, *_ = bound.features(
            batch.inputs, batch.positions, batch.segment_ids, execution
        )
        return bound.logits(x_BTD, execution)

    return np.float64(logits(params))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("mesh.tensor=4", "mesh.fsdp=2"),
        pytest.param(("model.tied_head=true",), marks=pytest.mark.slow),
    ],
    ids=["whole", "cut", "tied"],
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_ids_that_only_pad_the_vocabulary_have_no_probability(
    programs, batch, more, platform
):
    """The same holds in training and validation, for any tiles and any sharding."""
    program = programs(["model.num_layers=1", *more], devices=8 if len(more) > 1 else 1)
    placement = replace(program.execution.placement, platform=platform)
    execution = program.execution._replace(placement=placement)
    program = replace(program, num_tokens=257, execution=execution)
    model = program.model
    execution = program.execution._replace(placement=ONE_DEVICE)
    params = program.init().params
    sharded_batch = jax.device_put(batch, program.batch_shardings)
    nats, targets = jax.device_get(program.eval_step(params, sharded_batch))
    step = make_gradients(model, program.execution, program.recipe, num_tokens=257)
    (loss,), grads, *_ = jax.device_get(jax.jit(step)(params, sharded_batch))
    log_probs = logits_of(model, jax.device_get(params), batch, execution)[..., :257]
    log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
    rows, columns = np.nonzero(batch.targets >= 0)
    expected = -log_probs[rows, columns, batch.targets[rows, columns]].sum()
    assert nats == pytest.approx(expected, rel=2e-6)
    assert loss == pytest.approx(nats / targets, rel=1e-6)
    is_tied = program.config.model.tied_head
    table = grads["embedding"]["weight"] if is_tied else grads["head"]["weight"].T
    assert (table[257:] == 0).all()
    assert (table[:257] != 0).any(axis=1).all()


@pytest.fixture(scope="module")
def whole(program, params, batch):
    return value_and_grads(program, params, batch, None)


def test_in_tiles_the_loss_and_its_gradient_are_the_same(program, params, batch, whole):
    assert_close(value_and_grads(program, params, batch, 8), whole)


@pytest.mark.parametrize(
    ("mesh", "chunk"),
    [((2, 2, 2), None), ((1, 2, 4), 8), ((4, 2, 1), 8)],
)
def test_the_loss_does_not_depend_on_the_mesh(
    programs, params, batch, whole, mesh, chunk
):
    shape = [
        f"mesh.{axis}={size}"
        for axis, size in zip(("data", "fsdp", "tensor"), mesh, strict=True)
    ]
    program = programs(["model.num_layers=1", *shape], devices=8)
    head = program.shardings.params["head"]["weight"].spec
    assert head == PartitionSpec("fsdp", "tensor")
    assert_close(value_and_grads(program, params, batch, chunk), whole)


@pytest.mark.parametrize(
    "rules",
    [
        ("mesh.params.vocab=[fsdp,tensor]", "mesh.params.embed=null"),
        ("mesh.params.vocab=null", "mesh.params.embed=null"),
        (
            *("mesh.params.vocab=fsdp", "mesh.params.embed=tensor"),
            *("mesh.params.heads=null", "mesh.params.kv_heads=null"),
            "mesh.params.mlp=null",
        ),
    ],
)
def test_the_loss_does_not_depend_on_the_sharding_rules(
    programs, params, batch, whole, rules
):
    """Some rules shard the vocabulary over devices that hold different rows."""
    shape = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    program = programs(["model.num_layers=1", *shape, *rules], devices=8)
    assert_close(value_and_grads(program, params, batch, 8), whole)


def test_a_tied_table_has_the_same_loss_in_tiles(programs, batch):
    program = programs(
        ["model.num_layers=1", "model.tied_head=true", "mesh.fsdp=8"], devices=8
    )
    params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
    expected = value_and_grads(program, params, batch, None)
    assert_close(value_and_grads(program, params, batch, 8), expected)


def test_the_loss_is_the_cross_entropy_of_targets_plus_the_z_loss(
    program, params, batch, whole
):
    """NumPy computes the expected values from the logits."""
    logits = logits_of(program.model, params, batch, program.execution)
    log_z = np.log(np.exp(logits).sum(-1))
    has_target = np.asarray(batch.targets) >= 0
    target_logits = np.take_along_axis(
        logits, np.asarray(batch.targets)[..., None], -1
    )[..., 0]
    nats = (log_z - target_logits)[has_target].sum()
    z = (log_z**2)[has_target].sum()
    (loss, actual_nats), _ = whole
    assert float(actual_nats) == pytest.approx(nats, rel=1e-5)
    assert float(loss) == pytest.approx(nats + 0.1 * z, rel=1e-5)


def largest_float(program) -> int:
    """Count the elements of the compiled step's largest float32 buffer."""
    step = program.train_step.lower(program.state, program.batch)
    shapes = re.findall(r"f32\[([\d,]+)\]", step.compile().as_text())
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


@pytest.mark.parametrize("tiled", [True, False])
def test_a_large_vocabularys_logits_never_exist_at_once(program, tiled):
    B = 2
    T = 256
    V = 8192
    config = program.config
    config = replace(
        config,
        model=replace(config.model, vocab_size=V),
        data=replace(config.data, sequence_length=T, batch_size=B),
        train=replace(config.train, loss_chunk_tokens=None if tiled else T),
    )
    largest = largest_float(make_program(config, jax.devices()[:1]))
    assert largest == (B * 128 * V if tiled else B * T * V)
