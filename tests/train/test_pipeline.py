"""Stages of layers: the same loss and gradients as on one device."""

import jax
import numpy as np
import pytest
from flax import nnx

from data.batches import Order
from model.gpt import GPT, params_of
from tests.train.test_experts import MOE, distance
from tests.train.test_program import train
from train.config import CheckpointConfig
from train.errors import ConfigError
from train.feed import place
from train.plan.compiled.step import read_step
from train.plan.estimated.step import estimate_step
from train.run.checkpoint import Checkpoints
from train.step import make_gradients

DEEP = ("model.num_layers=4", "model.embed_dim=16")
MIXED = ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def gradients(programs, store):
    """Run one step's gradients: overrides -> loss, grads, load."""

    def gradients(*overrides, devices=8):
        program = programs(*overrides, devices=devices)
        step = make_gradients(program.model, program.how, program.config.train)
        with jax.set_mesh(program.mesh):
            params = params_of(GPT(program.config.model, nnx.Rngs(1)))
            params = jax.device_put(params, program.shardings.params)
            batch = Order(store, program.config.data, 0).read(0)
            assert (batch.targets < 0).any()  # documents end inside of rows
            return jax.device_get(jax.jit(step)(params, place(batch, program.batch)))

    return gradients


@pytest.fixture(scope="module")
def alone(gradients):
    """The gradients of one device, by what the model is."""
    known = {}

    def alone(*overrides):
        if overrides not in known:
            known[overrides] = gradients(*overrides, devices=1)
        return known[overrides]

    return alone


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((*MIXED, "train.remat=dots"), marks=SLOW),
        ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.pipeline_repeats=2"),
        pytest.param(
            (*MIXED, "mesh.pipeline_repeats=2", "train.remat=full"), marks=SLOW
        ),
        pytest.param(("mesh.pipeline=4", "mesh.data=2"), marks=SLOW),
        pytest.param(("mesh.pipeline=2", "mesh.context=4"), marks=SLOW),
        pytest.param(("mesh.pipeline=2", "mesh.data=4"), marks=SLOW),
        pytest.param(
            (
                *("mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=1"),
                *("train.pipeline_microbatches=4", "mesh.pipeline_repeats=2"),
            ),
            marks=SLOW,
        ),
        pytest.param(
            (
                *("mesh.pipeline=2", "mesh.fsdp=2", "train.accumulation_steps=2"),
                "mesh.pipeline_repeats=2",
            ),
            marks=SLOW,
        ),
    ],
    ids=" ".join,
)
def test_gradients_are_those_of_one_device(gradients, alone, mesh):
    loss, grads, _ = alone(*DEEP)
    devices = 4 if "mesh.tensor=2" not in mesh and len(mesh) > 2 else 8
    found = gradients(*DEEP, *mesh, devices=devices)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


LOCAL = ("model.window=5", "model.layer_pattern=[local,global]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2")], ids=" ".join
)
def test_local_layers_are_those_of_one_device(gradients, alone, mesh):
    loss, grads, _ = alone(*DEEP, *LOCAL)
    found = gradients(*DEEP, *LOCAL, *mesh)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


def test_a_pattern_is_the_same_on_each_stage(programs):
    three = "model.layer_pattern=[local,local,global]"
    with pytest.raises(ConfigError) as error:
        programs(*DEEP, *LOCAL, three, "mesh.pipeline=2", "mesh.data=4", devices=8)
    assert [m.key for m in error.value.mistakes] == ["model.layer_pattern"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.pipeline=2", "mesh.expert=4"),
        (*("mesh.pipeline=2", "mesh.expert=2"), "mesh.tensor=2", "train.remat=full"),
        ("mesh.pipeline=2", "mesh.expert=4", "model.dense_layers=2"),
        ("mesh.pipeline=2", "mesh.fsdp=4", "mesh.pipeline_repeats=2"),
    ],
    ids=" ".join,
)
def test_with_experts_too(gradients, alone, mesh):
    """But for the loss of the load, which is a microbatch's own."""
    model = (*MOE, "model.num_layers=4", "model.router_aux_weight=0")
    model = (*model, *(key for key in mesh if key.startswith("model")))
    model = (*model, *["model.dense_layers=0"] * ("model.dense_layers=2" not in mesh))
    loss, grads, load = alone(*model)
    found = gradients(*model, *mesh)
    np.testing.assert_array_equal(found[2], load)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_losses_do_not_depend_on_the_stages(programs, store, optimizer):
    named = (*DEEP, f"optimizer={optimizer}", "optimizer.ema_decay=0.9")
    one = programs(*named, devices=1)
    state = jax.device_get(one.init())
    expected = train(one, store, state, 6)
    found = train(
        programs(*named, *MIXED, "mesh.pipeline_repeats=2", devices=8), store, state, 6
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_run_on_stages_goes_on_there_to_the_bit_and_elsewhere(
    programs, store, tmp_path
):
    """From circular stages, to them and to fsdp 8; the state knows of no stages."""
    named = (*DEEP, "optimizer.ema_decay=0.9")
    staged = programs(*named, *MIXED, "mesh.pipeline_repeats=2", devices=8)
    elsewhere = programs(*named, "mesh.fsdp=8", devices=8)

    def steps(program, state, first: int, last: int):
        losses = []
        with jax.set_mesh(program.mesh):
            for step in range(first, last):
                batch = Order(store, program.config.data, 0).read(step)
                state, found = program.train_step(state, place(batch, program.batch))
                losses.append(float(found["loss"]))
        return state, losses

    state, _ = steps(staged, staged.init(), 0, 3)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, {"step": 3})
    checkpoints.wait()
    end, expected = steps(staged, state, 3, 6)
    again, losses = steps(staged, checkpoints.saved.restore(staged.state), 3, 6)
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((again, end)))
    there = checkpoints.saved.restore(elsewhere.state)
    checkpoints.close()
    assert jax.tree.map(lambda leaf: leaf.sharding, there) == elsewhere.shardings
    np.testing.assert_allclose(steps(elsewhere, there, 3, 6)[1], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "iterations"), [(1, 5), (2, 9)])
def test_the_compiled_step_does_as_many_iterations_as_planned(
    programs, repeats, iterations
):
    """Read off how often it permutes, twice an iteration and pass, and multiplies."""
    named = "mesh.pipeline=2", "mesh.data=2", "train.pipeline_microbatches=4"
    program = programs(*DEEP, *named, f"mesh.pipeline_repeats={repeats}", devices=4)
    pipeline = program.pipeline
    assert pipeline.iterations == iterations
    assert pipeline.bubble == 1 / iterations
    with jax.set_mesh(program.mesh):
        step = program.train_step.lower(program.state, program.batch).compile()
    read, estimated = read_step(program, step.as_text()), estimate_step(program)
    rows = program.config.data.batch_size // 8 * 32 * 16 * 4  # bytes of a microbatch
    for cost in (read, estimated) if repeats == 1 else ():  # else weights travel too
        (sent,) = [t for t in cost.sent if t.kind == "collective-permute"]
        assert sent.payload == 4 * iterations * rows
    assert read.flops.total == pytest.approx(estimated.flops.total, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "key", "rule"),
    [
        (("model.num_layers=3",), "mesh.pipeline", "must divide the 3 layers"),
        (("mesh.pipeline_repeats=4",), "mesh.pipeline", "repeats=4 must divide the 4"),
        (
            ("train.pipeline_microbatches=3",),
            "train.pipeline_microbatches",
            "multiple of mesh.pipeline=2",
        ),
        (
            ("train.pipeline_microbatches=16",),
            "data.batch_size",
            "x 8 (train.pipeline_microbatches / mesh.pipeline); nearest: 32",
        ),
    ],
)
def test_what_stages_cannot_share_is_said_at_once(programs, changed, key, rule):
    with pytest.raises(ConfigError) as error:
        programs(*DEEP, "mesh.pipeline=2", "mesh.data=2", *changed, devices=4)
    found = {mistake.key: mistake.rule for mistake in error.value.mistakes}
    assert rule in found[key]
