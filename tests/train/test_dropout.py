"""Steps that leave out some of what passes."""

import jax
import numpy as np
import pytest

from data.batches import Order
from tests.train.conftest import CUBE, DEEP, MOE, losses_of
from train.core.feed import place
from train.errors import ConfigError

INSIDE = ("model.dropout.embedding=0.2", "model.dropout.residual=0.3")
ALL = (*INSIDE, "model.dropout.attention=0.2")


def lowered(program) -> str:
    return program.train_step.lower(program.state, program.batch).as_text()


def test_off_the_step_is_as_without_it(programs, composed, monkeypatch):
    """Another name keeps the program from being one that was traced before."""
    off = lowered(programs("model.name=off"))
    with monkeypatch.context() as patch:
        for module in ("gpt", "block"):
            patch.setattr(f"model.{module}.drop", lambda x, *_: x)
        assert lowered(programs("model.name=without")) == off
    assert lowered(programs("model.name=on", INSIDE[1])) != off


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.attention", ("model.attention=cudnn",)),
        ("model.dropout.attention", ("mesh.context=2", "mesh.data=1")),
    ],
)
def test_weights_of_keys_are_left_out_by_the_plain_kernel_alone(
    programs, key, overrides
):
    with pytest.raises(ConfigError) as error:
        programs(*ALL, *overrides, devices=2 if len(overrides) > 1 else 1)
    assert [mistake.key for mistake in error.value.mistakes] == [key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "devices"),
    [
        (ALL, CUBE, 8),
        (ALL, ("train.accumulation_steps=2", "train.remat=full"), 1),
        (ALL, ("mesh.pipeline=2", "mesh.data=2", "mesh.pipeline_repeats=2"), 4),
        (INSIDE, ("mesh.context=2", "mesh.data=1"), 2),
        ((*MOE, *INSIDE), ("mesh.expert=2", "mesh.data=2"), 4),
        (("model.compute_dtype=int8",), ("mesh.pipeline=2",), 2),
    ],
    ids=["cube", "microbatches", "pipeline", "context", "experts", "int8"],
)
def test_the_same_is_left_out_on_any_mesh(programs, store, model, mesh, devices):
    alone = programs(*DEEP, *model)
    other = programs(*DEEP, *model, *mesh, devices=devices)
    state = jax.device_get(alone.init())
    expected, found = (losses_of(p, store, state, 2) for p in (alone, other))
    rounded = "model.compute_dtype=int8" in model
    np.testing.assert_allclose(found, expected, rtol=3e-3 if rounded else 2e-5)


@pytest.mark.slow
def test_what_is_left_out_is_a_function_of_seed_and_step(programs, store):
    """So a run that was stopped goes on as it would have; evaluation drops nothing."""
    program = programs(*ALL)
    batch = place(Order(store, program.config.data, 0).read(0), program.batch)
    state = jax.device_get(program.init())

    def loss(step: int, program=program) -> float:
        own = jax.device_put(state._replace(step=np.int32(step)), program.shardings)
        return float(program.train_step(own, batch)[1]["loss"])

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)
    nats, targets = program.eval_step(state.params, batch)
    plain = programs()
    assert loss(0, plain) == pytest.approx(float(nats / targets), rel=1e-6)
    assert abs(loss(0, plain) - loss(0)) > 1e-3
