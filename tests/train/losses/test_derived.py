"""A loss of which only the value is written has the right gradient on any mesh."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batch import Batch
from data.batches import Order
from model.catalog import MODEL_PARTS
from model.gpt import GPT, bind, params_of
from model.placement import ONE_DEVICE
from tests.train.conftest import distance
from train.core.feed import place
from train.core.loss import loss as loss_module
from train.core.loss.form import LossForm
from train.core.loss.token_loss import CrossEntropy, Tokens
from train.core.step import make_gradients
from train.losses.catalog import make_loss
from train.losses.derived import DerivedLoss

NUM_TOKENS = 257


@dataclass(frozen=True)
class Focal:
    """A loss whose derivatives by log Z and by the target's logit both vary.

    Without a target, the logit counts as zero, and the root is often not a number.
    """

    gamma: float

    def __call__(self, log_z: jax.Array, target_logit: jax.Array) -> jax.Array:
        nats = log_z - target_logit
        return (1 - jnp.exp(-nats)) ** self.gamma * nats + 0.01 * jnp.sqrt(log_z)


FOCAL = DerivedLoss(Focal(gamma=1.5))


def smoothed(log_z: jax.Array, target_logit: jax.Array, mean_logit: jax.Array):
    """A tenth of the target's probability goes to all ids alike."""
    return log_z - 0.9 * target_logit - 0.1 * mean_logit


SMOOTHED = DerivedLoss(smoothed, uses_mean_logit=True)


def cross_entropy(log_z: jax.Array, target_logit: jax.Array) -> jax.Array:
    return log_z - target_logit + 0.1 * jnp.square(log_z)


@pytest.fixture
def gradients(programs, store, monkeypatch):
    """Return a function (token_loss, form, overrides, devices) -> loss, gradients."""

    def gradients(token_loss, form, overrides=(), devices=1):
        monkeypatch.setattr(loss_module, "choose_form", lambda *_: form)
        program = programs(["model.num_layers=1", *overrides], devices=devices)
        recipe = program.recipe._replace(token_loss=token_loss)
        step = make_gradients(
            program.model, program.execution, recipe, num_tokens=NUM_TOKENS
        )
        params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
        params = jax.device_put(params, program.shardings.params)
        results = jax.jit(step)(params, place(read(program, store), program.batch))
        return jax.device_get(results[:2])

    return gradients


def read(program, store) -> Batch:
    batch = Order(store, program.config.data, 0).read(0)
    assert (batch.targets < 0).any()
    return batch


@pytest.fixture
def plain_gradients(programs, store):
    """Return a function (value, overrides) -> nats, gradients of all logits at once."""

    def plain_gradients(value, overrides=()):
        program = programs(["model.num_layers=1", *overrides], devices=1)
        execution = program.execution._replace(placement=ONE_DEVICE)
        batch = jax.tree.map(jnp.asarray, read(program, store))
        rows, columns = np.nonzero(batch.targets >= 0)

        def mean_loss(params):
            model = bind(program.model, params)
            x_BTD, *_ = model.features(
                batch.inputs, batch.positions, batch.segment_ids, execution
            )
            logits = model.logits(x_BTD, execution)[rows, columns, :NUM_TOKENS]
            log_z = jax.nn.logsumexp(logits, axis=-1)
            target_logit = logits[np.arange(rows.size), batch.targets[rows, columns]]
            nats = jnp.mean(log_z - target_logit)
            arguments = [log_z, target_logit, jnp.mean(logits, axis=-1)]
            num_arguments = 3 if value is smoothed else 2
            return jnp.mean(value(*arguments[:num_arguments])), nats

        params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
        grads, nats = jax.jit(jax.grad(mean_loss, has_aux=True))(params)
        return jax.device_get(((nats,), grads))

    return plain_gradients


@pytest.mark.parametrize("more", [(), ("model.tied_head=true",)], ids=["head", "tied"])
def test_the_gradient_is_that_of_all_logits_at_once(gradients, plain_gradients, more):
    """The reported nats are the cross-entropy, whatever the loss is."""
    more = (*more, "model.logit_soft_cap=20")
    for loss in (FOCAL, SMOOTHED):
        expected = plain_gradients(loss.value, more)
        for form in (LossForm(32), LossForm(8), LossForm(8, ids=160)):
            assert distance(gradients(loss, form, more), expected) <= 1e-5, form


@pytest.mark.parametrize(
    ("form", "devices", "mesh"),
    [
        (LossForm(8), 8, ("mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2")),
        pytest.param(LossForm(8), 4, ("mesh.tensor=4",), marks=pytest.mark.slow),
        pytest.param(
            LossForm(8, ids=160),
            4,
            ("mesh.fsdp=2", "mesh.context=2"),
            marks=pytest.mark.slow,
        ),
        (LossForm(8), 4, ("mesh.fsdp=2", "mesh.data=2", "train.accumulation_steps=2")),
    ],
)
def test_the_gradient_does_not_depend_on_the_mesh(gradients, form, devices, mesh):
    for loss in (FOCAL, SMOOTHED):
        expected = gradients(loss, LossForm(32))
        assert distance(gradients(loss, form, mesh, devices), expected) <= 1e-5


@pytest.mark.parametrize("form", [LossForm(8), LossForm(8, ids=160)])
def test_cross_entropy_by_its_value_has_the_gradient_of_the_default(gradients, form):
    derived = gradients(DerivedLoss(cross_entropy), form)
    assert distance(derived, gradients(CrossEntropy(0.1), form)) <= 1e-6


def test_the_sum_is_over_tokens_with_a_target():
    log_z = jnp.array([[2.0, 3.0, -1.0]])
    target_logit = jnp.array([[1.0, 1.0, 0.0]])
    tokens = Tokens(log_z, target_logit, jnp.array([[True, True, False]]))
    expected = sum(FOCAL.value(log_z, target_logit)[0, :2])
    assert FOCAL.sum(tokens, jnp.float32(3)) == pytest.approx(float(expected))


def test_losses_hash_by_value(configure):
    """The planner caches traces by the recipe, and so by the loss."""
    train = configure(("train.z_loss=0.1",)).train
    assert make_loss(train) == make_loss(train) != make_loss(configure(()).train)
    assert hash(make_loss(train)) == hash(CrossEntropy(0.1))
    assert DerivedLoss(Focal(1.5)) == FOCAL != DerivedLoss(Focal(2.0))
    assert hash(DerivedLoss(Focal(1.5))) == hash(FOCAL)
    assert hash(DerivedLoss(cross_entropy)) == hash(DerivedLoss(cross_entropy))
