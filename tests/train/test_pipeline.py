"""Pipeline stages take the planned iterations; test_meshes.py compares gradients."""

import jax
import numpy as np
import pytest

from tests.train.conftest import DEEP, losses_of
from train.errors import ConfigError
from train.plan.compiled.step import read_step
from train.plan.estimated.local_step import local_step
from train.plan.estimated.step import estimate_step

MIXED = ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.slow
def test_losses_of_muon_do_not_depend_on_the_stages(programs, store):
    overrides = (*DEEP, "optimizer=muon", "optimizer.ema_decay=0.9")
    program = programs(overrides, devices=1)
    state = jax.device_get(program.init())
    expected = losses_of(program, store, state, 6)
    actual = losses_of(
        programs([*overrides, *MIXED, "mesh.pipeline_repeats=2"], devices=8),
        store,
        state,
        6,
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "iterations"), [(1, 5), (2, 9)])
def test_the_compiled_step_does_as_many_iterations_as_planned(
    programs, repeats, iterations
):
    """The numbers of permutes (two an iteration and pass) and of FLOPs show it."""
    overrides = "mesh.pipeline=2", "mesh.data=2", "train.pipeline_microbatches=4"
    program = programs(
        [*DEEP, *overrides, f"mesh.pipeline_repeats={repeats}"], devices=4
    )
    pipeline = program.pipeline
    assert pipeline.iterations == iterations
    assert pipeline.bubble == 1 / iterations
    step = program.train_step.lower(program.state, program.batch).compile()
    compiled_cost = read_step(program, step.as_text(), local_step(program).flops)
    estimated_cost = estimate_step(program)
    rows = program.config.data.batch_size // 8 * 32 * 16 * 4  # bytes of a microbatch
    # Steps with repeats also send weights.
    for cost in (compiled_cost, estimated_cost) if repeats == 1 else ():
        (permute,) = [t for t in cost.sent if t.kind == "collective-permute"]
        assert permute.payload == 4 * iterations * rows
    assert compiled_cost.flops.total == pytest.approx(
        estimated_cost.flops.total, rel=0.01
    )


@pytest.mark.parametrize(
    ("changed", "key", "rule"),
    [
        (("model.num_layers=3",), "mesh.pipeline", "must divide the 3 layers"),
        (
            ("model.window=5", "model.layer_pattern=[local,local,global]"),
            "model.layer_pattern",
            "must be the same in each group of 2 layers",
        ),
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
def test_settings_that_stages_cannot_share_are_refused(programs, changed, key, rule):
    with pytest.raises(ConfigError) as error:
        programs([*DEEP, "mesh.pipeline=2", "mesh.data=2", *changed], devices=4)
    rules = {mistake.key: mistake.rule for mistake in error.value.mistakes}
    assert rule in rules[key]
