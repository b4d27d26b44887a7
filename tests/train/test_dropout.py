"""Dropout is off by default, the same on any mesh, and a function of the step."""

import jax
import numpy as np
import pytest

from data.batches import Order
from model import block, gpt
from tests.train.conftest import CUBE, DEEP, MOE, losses_of
from train.core.feed import place
from train.errors import ConfigError

INSIDE = ("model.dropout.embedding=0.2", "model.dropout.residual=0.3")
ALL = (*INSIDE, "model.dropout.attention=0.2")


def lowered_text(program) -> str:
    return program.train_step.lower(program.state, program.batch).as_text()


def test_dropout_that_is_off_leaves_the_step_unchanged(programs, composed, monkeypatch):
    """The other names keep `programs` from returning a program traced before."""
    off_text = lowered_text(programs(["model.name=off"]))
    with monkeypatch.context() as patch:
        for module in (gpt, block):
            patch.setattr(module, "drop", lambda x, *_: x)
        assert lowered_text(programs(["model.name=without"])) == off_text
    assert lowered_text(programs(["model.name=on", INSIDE[1]])) != off_text


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.attention", ("model.attention=cudnn",)),
        ("model.dropout.attention", ("mesh.context=2", "mesh.data=1")),
    ],
)
def test_only_the_plain_kernel_drops_attention_weights(programs, key, overrides):
    with pytest.raises(ConfigError) as error:
        programs([*ALL, *overrides], devices=2 if len(overrides) > 1 else 1)
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
def test_any_mesh_drops_the_same_values(programs, store, model, mesh, devices):
    on_one_device = programs([*DEEP, *model])
    on_the_mesh = programs([*DEEP, *model, *mesh], devices=devices)
    state = jax.device_get(on_one_device.init())
    expected, actual = (
        losses_of(p, store, state, 2) for p in (on_one_device, on_the_mesh)
    )
    is_int8 = "model.compute_dtype=int8" in model
    np.testing.assert_allclose(actual, expected, rtol=3e-3 if is_int8 else 2e-5)


@pytest.mark.slow
def test_dropout_is_a_function_of_seed_and_step(programs, store):
    """A stopped run continues as if it had not stopped. Evaluation drops nothing."""
    program = programs(ALL)
    batch = place(Order(store, program.config.data, 0).read(0), program.batch)
    state = jax.device_get(program.init())

    def loss(step: int, program=program) -> float:
        state_at_step = jax.device_put(
            state._replace(step=np.int32(step)), program.shardings
        )
        return float(program.train_step(state_at_step, batch)[1]["loss"])

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)
    nats, targets = program.eval_step(state.params, batch)
    program_without_dropout = programs()
    assert loss(0, program_without_dropout) == pytest.approx(
        float(nats / targets), rel=1e-6
    )
    assert abs(loss(0, program_without_dropout) - loss(0)) > 1e-3
