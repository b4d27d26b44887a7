"""Watched steps make the same update, report true figures and name the culprit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batches import Order
from tests.train import command_runs
from tests.train.command_runs import lines
from tests.train.conftest import CUBE, DEEP, MOE
from train.core.feed import place
from train.core.numerics import find_culprit

# Fixtures.
folder = command_runs.folder
run_command = command_runs.run_command
INTERVAL = "log.numerics_interval_steps=5"
PARTS = ("train.accumulation_steps=2", INTERVAL)


def take_step(program, store, step, state=None):
    """Run the step of that name once, from a state or from the initial state."""
    state = program.init() if state is None else jax.tree.map(jnp.copy, state)
    batch = place(Order(store, program.config.data, 0).read(0), program.batch)
    return jax.device_get(getattr(program, step)(state, batch))


@pytest.fixture(scope="module")
def program(programs):
    return programs(PARTS)


@pytest.fixture(scope="module")
def start(program):
    return jax.device_get(program.init())


@pytest.fixture(scope="module")
def watched(program, store):
    return take_step(program, store, "watched_step")


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_that_is_watched_takes_the_same_steps_as_one_that_is_not(
    program, programs
):
    unwatched = programs([PARTS[0]])
    texts = []
    for variant in (program, unwatched):
        step = variant.train_step.lower(variant.state, variant.batch)
        texts.append(step.as_text())
    assert texts[0] == texts[1]
    assert "abs" not in texts[0]  # Every tap begins with it.


def test_a_watched_step_makes_the_same_update(program, store, watched):
    plain_state, metrics = take_step(program, store, "train_step")
    assert_equal(plain_state, watched[0])
    assert_equal(metrics, {name: watched[1][name] for name in metrics})


def test_figures_are_reported_for_each_layer(program, store, start, watched):
    state, metrics = watched
    figures = {key: v for key, v in metrics.items() if key.startswith("numerics/")}
    assert {values.shape for values in figures.values()} == {(2,)}
    ids = Order(store, program.config.data, 0).read(0).inputs
    rows = start.params["embedding"]["weight"][ids]
    assert figures["numerics/residual"][0] == np.abs(rows).max()
    # The squared norm also includes parameters outside the layers.
    assert sum(figures["numerics/grad_norm"] ** 2) < metrics["grad_norm"] ** 2
    assert (figures["numerics/grad_largest"] < figures["numerics/grad_norm"]).all()
    for layer in range(2):
        old_weights, new_weights = (
            np.concatenate([x[layer].ravel() for x in jax.tree.leaves(layers_of(p))])
            for p in (start.params, state.params)
        )
        ratio = np.linalg.norm(new_weights - old_weights) / np.linalg.norm(old_weights)
        actual = figures["numerics/update_ratio"][layer]
        assert actual == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("part", "name", "layer", "value"),
    [("mlp", "up", 1, 1e38), ("attention", "query", 0, np.nan)],
)
def test_the_layer_with_bad_weights_is_named(
    program, store, start, part, name, layer, value
):
    """A whole matrix is bad. The step is skipped and the layer is named."""
    bad_state = jax.tree.map(np.copy, start)
    layers_of(bad_state.params)[part][name]["weight"][layer] = value
    next_state, metrics = take_step(program, store, "watched_step", bad_state)
    assert metrics["skipped"] == 1
    assert_equal(next_state.params, bad_state.params)
    culprit = find_culprit(metrics, None)
    assert culprit is not None
    assert (culprit.quantity, culprit.layer) == (part, layer)


def layers_of(params):
    return params["layers"]["0"]["0"]


def figures(**replacements):
    """Return the figures of three layers, with some of them replaced."""
    names = ("residual", "attention", "mlp", "grad_largest", "grad_norm")
    values = {name: [1.0, 1.0, 1.0] for name in names} | replacements
    return {f"numerics/{name}": np.array(v) for name, v in values.items()}


def test_bad_gradients_are_traced_from_the_last_layer_to_the_first():
    norms = [np.inf, np.nan, 2.0]
    culprit = find_culprit(figures(grad_norm=norms, grad_largest=norms), None)
    assert str(culprit) == "layer 1: the norm of its gradients is not finite"


def test_the_figure_that_grew_most_is_the_spike():
    current = figures(mlp=[2.0, 3.0, 9.0], grad_norm=[1.0, 50.0, 3.0])
    assert (
        str(find_culprit(current, figures()))
        == "layer 1: the norm of its gradients is 50"
    )
    assert find_culprit(current, None) is None
    assert find_culprit(figures(mlp=[3.0, 1.0, 1.0]), figures()) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "devices"),
    [
        ((), CUBE, 8),
        ((), ("mesh.context=2", "train.remat=full"), 2),
        (MOE, ("mesh.expert=2", "mesh.fsdp=2"), 4),
        (DEEP, ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.pipeline_repeats=2"), 4),
    ],
)
def test_figures_are_the_same_on_any_mesh(programs, store, model, mesh, devices):
    _, expected = take_step(programs(model), store, "watched_step")
    program = programs([*model, *mesh], devices=devices)
    state, watched_metrics = take_step(program, store, "watched_step")
    names = [name for name in expected if name.startswith("numerics/")]
    for name in names:
        np.testing.assert_allclose(watched_metrics[name], expected[name], rtol=1e-3)
    plain_state, metrics = take_step(program, store, "train_step")
    assert_equal(
        (plain_state, metrics),
        (state, {name: watched_metrics[name] for name in metrics}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_eight_bits_flush_small_values(programs, store, dtype):
    """The gains of a norm differ so much in size that small values are flushed."""
    program = programs([f"model.compute_dtype={dtype}"])
    state = jax.device_get(program.init())
    state = jax.tree.map(np.copy, state)
    scale = layers_of(state.params)["mlp_norm"]["scale"]
    scale[1, :] = 1e-6
    scale[1, 0] = 1.0
    _, metrics = take_step(program, store, "watched_step", state)
    flushed, saturated = (
        metrics[f"numerics/{name}"] for name in ("flushed", "saturated")
    )
    assert flushed[1] > 0.1 > flushed[0] >= 0
    assert (saturated < 0.1).all()


@pytest.mark.slow
def test_figures_are_recorded_before_a_score_and_a_save_of_their_step(
    folder, run_command
):
    """No start repeats the steps of a checkpoint. The run crashes after step 5."""
    overrides = (
        *("log.numerics_interval_steps=1", "checkpoint.save_interval_steps=2"),
        *("log.interval_steps=20", "eval.interval_steps=3", "eval.num_batches=1"),
    )
    result = run_command(folder / "crashed", overrides, fault="crash:0:5")
    assert result.returncode == 1, result.stderr
    # The other lines count the tokens before a save or an evaluation.
    rows = [row for row in lines(folder / "crashed") if "tokens" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    assert ["eval/loss" in row for row in rows] == [False, False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("most", "watched"), [(6, [5, 9]), (0, [5])])
def test_a_run_names_the_layer_to_blame(folder, run_command, most, watched):
    """A layer is spoiled after step 3, and step 4 ends a window: step 5 shows it.

    Step 5 is taken to find the layer even if no further update may be skipped."""
    run = folder / f"blamed-{most}"
    overrides = (
        *("log.numerics_interval_steps=100", "log.interval_steps=4"),
        "checkpoint.save_interval_steps=100",  # A save would refuse the bad layer.
    )
    fault = "fill:3:params.layers.0.0.mlp.down.weight:1:nan"
    result = run_command(
        run, [*overrides, f"train.max_skipped_steps={most}"], fault=fault
    )
    assert result.returncode == 3, result.stderr
    assert "layer 1: its MLP is not finite" in result.stdout + result.stderr
    rows = [line for line in lines(run) if "numerics/mlp/1" in line]
    assert [line["step"] for line in rows] == watched
    assert rows[0]["numerics/mlp/0"] > 0
    assert rows[0]["numerics/mlp/1"] is None
