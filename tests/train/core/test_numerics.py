"""Watched steps: the same update, figures that are true, and who is to blame."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batches import Order
from tests.train import doors
from tests.train.conftest import CUBE, DEEP, MOE
from tests.train.doors import lines
from train.core.feed import place
from train.core.numerics import find_culprit

# Fixtures.
folder = doors.folder
door = doors.door
INTERVAL = "log.numerics_interval_steps=5"
PARTS = ("train.accumulation_steps=2", INTERVAL)


def taken(program, store, step, state=None):
    """Take a step, the one of that name, from a state or from the start."""
    state = program.init() if state is None else jax.tree.map(jnp.copy, state)
    batch = place(Order(store, program.config.data, 0).read(0), program.batch)
    return jax.device_get(getattr(program, step)(state, batch))


@pytest.fixture(scope="module")
def program(programs):
    return programs(*PARTS)


@pytest.fixture(scope="module")
def start(program):
    return jax.device_get(program.init())


@pytest.fixture(scope="module")
def watched(program, store):
    return taken(program, store, "watched_step")


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_that_is_watched_takes_the_same_steps_as_one_that_is_not(
    program, programs
):
    unwatched = programs(PARTS[0])
    texts = []
    for each in (program, unwatched):
        step = each.train_step.lower(each.state, each.batch)
        texts.append(step.as_text())
    assert texts[0] == texts[1]
    assert "abs" not in texts[0]  # what every tap begins with


def test_a_watched_step_makes_the_same_update(program, store, watched):
    plain, metrics = taken(program, store, "train_step")
    same(plain, watched[0])
    same(metrics, {name: watched[1][name] for name in metrics})


def test_figures_are_of_each_layer(program, store, start, watched):
    state, metrics = watched
    figures = {key: v for key, v in metrics.items() if key.startswith("numerics/")}
    assert {values.shape for values in figures.values()} == {(2,)}
    ids = Order(store, program.config.data, 0).read(0).inputs
    rows = start.params["embedding"]["weight"][ids]
    assert figures["numerics/residual"][0] == np.abs(rows).max()
    # Its square is the sum of all layers' and of what is in none.
    assert sum(figures["numerics/grad_norm"] ** 2) < metrics["grad_norm"] ** 2
    assert (figures["numerics/grad_largest"] < figures["numerics/grad_norm"]).all()
    for layer in range(2):
        before, after = (
            np.concatenate([x[layer].ravel() for x in jax.tree.leaves(layers_of(p))])
            for p in (start.params, state.params)
        )
        ratio = np.linalg.norm(after - before) / np.linalg.norm(before)
        found = figures["numerics/update_ratio"][layer]
        assert found == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("part", "name", "layer", "value"),
    [("mlp", "up", 1, 1e38), ("attention", "query", 0, np.nan)],
)
def test_the_layer_that_is_to_blame(program, store, start, part, name, layer, value):
    """All of a matrix is spoiled: the step is left out, the layer named."""
    spoiled = jax.tree.map(np.copy, start)
    layers_of(spoiled.params)[part][name]["weight"][layer] = value
    after, metrics = taken(program, store, "watched_step", spoiled)
    assert metrics["skipped"] == 1
    same(after.params, spoiled.params)
    found = find_culprit(metrics, None)
    assert found is not None
    assert (found.quantity, found.layer) == (part, layer)


def layers_of(params):
    return params["layers"]["0"]["0"]


def figures(**changed):
    """Give three layers' figures, some of them changed."""
    names = ("residual", "attention", "mlp", "grad_largest", "grad_norm")
    values = {name: [1.0, 1.0, 1.0] for name in names} | changed
    return {f"numerics/{name}": np.array(v) for name, v in values.items()}


def test_gradients_go_from_the_last_layer_to_the_first():
    bad = [np.inf, np.nan, 2.0]
    found = find_culprit(figures(grad_norm=bad, grad_largest=bad), None)
    assert str(found) == "layer 1: the norm of its gradients is not finite"


def test_a_spike_is_what_has_grown_most():
    now = figures(mlp=[2.0, 3.0, 9.0], grad_norm=[1.0, 50.0, 3.0])
    assert (
        str(find_culprit(now, figures())) == "layer 1: the norm of its gradients is 50"
    )
    assert find_culprit(now, None) is None
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
    _, alone = taken(programs(*model), store, "watched_step")
    program = programs(*model, *mesh, devices=devices)
    state, found = taken(program, store, "watched_step")
    names = [name for name in alone if name.startswith("numerics/")]
    for name in names:
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-3)
    plain, metrics = taken(program, store, "train_step")
    same((plain, metrics), (state, {name: found[name] for name in metrics}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_what_eight_bits_lose(programs, store, dtype):
    """Gains of a norm of very different sizes: the small values are flushed."""
    program = programs(f"model.compute_dtype={dtype}")
    state = jax.device_get(program.init())
    state = jax.tree.map(np.copy, state)
    scale = layers_of(state.params)["mlp_norm"]["scale"]
    scale[1, :] = 1e-6
    scale[1, 0] = 1.0
    _, metrics = taken(program, store, "watched_step", state)
    flushed, saturated = (
        metrics[f"numerics/{name}"] for name in ("flushed", "saturated")
    )
    assert flushed[1] > 0.1 > flushed[0] >= 0
    assert (saturated < 0.1).all()


@pytest.mark.slow
def test_figures_are_recorded_before_a_score_and_a_save_of_their_step(folder, door):
    """What a checkpoint holds no start does again: it crashes after step 5."""
    words = (
        *("log.numerics_interval_steps=1", "checkpoint.save_interval_steps=2"),
        *("log.interval_steps=20", "eval.interval_steps=3", "eval.num_batches=1"),
    )
    result = door(folder / "crashed", *words, drill="crash:0:5")
    assert result.returncode == 1, result.stderr
    # The other lines count the tokens before a save or an evaluation.
    rows = [row for row in lines(folder / "crashed") if "tokens" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    assert ["eval/loss" in row for row in rows] == [False, False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("most", "watched"), [(6, [5, 9]), (0, [5])])
def test_a_run_names_the_layer_to_blame(folder, door, most, watched):
    """A layer is spoiled after step 3, and step 4 ends a window: the next one shows it.

    It is taken, for that alone, also where no more may be left out."""
    run = folder / f"blamed-{most}"
    words = (
        *("log.numerics_interval_steps=100", "log.interval_steps=4"),
        "checkpoint.save_interval_steps=100",  # a save would refuse the spoiled layer
    )
    spoil = "fill:3:params.layers.0.0.mlp.down.weight:1:nan"
    result = door(run, *words, f"train.max_skipped_steps={most}", drill=spoil)
    assert result.returncode == 3, result.stderr
    assert "layer 1: its MLP is not finite" in result.stdout + result.stderr
    seen = [line for line in lines(run) if "numerics/mlp/1" in line]
    assert [line["step"] for line in seen] == watched
    assert seen[0]["numerics/mlp/0"] > 0
    assert seen[0]["numerics/mlp/1"] is None
