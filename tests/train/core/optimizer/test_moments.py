"""Moments in bfloat16 and eight bits: near float64, without bias, harmless."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.params import Kind, ParamInfo
from tests.train.core.optimizer.test_update import (
    ADAMW,
    INFOS,
    LEVEL,
    MUON,
    draw,
    take_steps,
)
from train.config import MomentDtype
from train.core.optimizer.moments import (
    MomentStorage,
    from_eight_bits,
    is_eight_bits,
    to_eight_bits,
)
from train.core.optimizer.rounding import key_of_step, random_bits
from train.optimizers.make import make_optimizer

MATRIX = ParamInfo(("layers", "embed", "heads", "head_dim"), Kind.matrix, 1)
SHAPE = (2, 6, 3, 4)


def kept(x, signed: bool, step: int = 0) -> np.ndarray:
    """Round an array to eight bits and back."""
    bits = random_bits(key_of_step(0, step), "w", x.shape)
    packed = to_eight_bits(jnp.asarray(x, jnp.float32), MATRIX, signed, bits)
    assert packed.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    return np.asarray(from_eight_bits(packed), np.float64)


def rough(signed: bool) -> np.ndarray:
    """Draw numbers of six orders of magnitude."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-3, 3, size=SHAPE)
    return np.asarray(x if signed else x**2, np.float32).astype(np.float64)


def least(x: np.ndarray) -> np.ndarray:
    rows = np.abs(x).max(axis=(2, 3), keepdims=True)
    return np.minimum(rows, np.abs(x).max(axis=1, keepdims=True))


@pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])
def test_eight_bits_are_off_by_less_than_a_step_and_right_on_average(signed):
    """Of levels (c / 127)**2, or (c / 255)**4, of the lesser of two maxima."""
    x = rough(signed)
    top, power = (127, 2) if signed else (255, 4)
    share = np.abs(x) / least(x)
    below = np.floor(top * share ** (1 / power) * (1 + 1e-6))
    step = (((below + 1) / top) ** power - (below / top) ** power) * least(x)
    draws = np.stack([kept(x, signed, step) for step in range(256)])
    assert (np.abs(draws - x) <= 1.001 * step).all()
    counts = share > top**-power  # below it a square is held at the least level
    off = np.abs(draws.mean(axis=0) - x)
    assert (off <= 5 * 0.5 * step / 16 + 1e-6 * np.abs(x))[counts | signed].all()
    assert np.ptp(draws, axis=0).any()


@pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])
def test_zeros_stay_zero_and_one_huge_entry_coarsens_no_other(signed):
    """But for those of its row and its column at once, of which it is the only one."""
    zero = kept(np.zeros(SHAPE), signed)
    assert not zero.any()
    x = np.ones(SHAPE)
    x[:, 0] = 0.0
    x[0, 3, 2, 1] = 1e30
    found = kept(x, signed)
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[x > 0], x[x > 0], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, pytest.param(1e15, marks=pytest.mark.slow)])
def test_gradients_of_any_size_move_weights_as_in_float32(size):
    grads = [jax.tree.map(lambda g: g * size, draw(step)) for step in range(1, 5)]
    exact, ours = (
        take_steps(replace(ADAMW, moment_dtype=dtype), draw(0), 4, grads=grads)
        for dtype in (MomentDtype.float32, MomentDtype.int8)
    )
    for (expected, _), (params, _) in zip(exact, ours, strict=True):
        for name, param in params.items():
            moved = np.abs(param - expected[name]) / ADAMW.learning_rate
            assert moved.max() < 0.2, name  # of a step of about 1


@pytest.mark.parametrize("dtype", [MomentDtype.bfloat16, MomentDtype.int8])
def test_a_mean_follows_float64_though_it_changes_by_less_than_a_step(dtype):
    """b2 = 0.999: rounded to the nearest, a mean square would never fall."""
    config = replace(ADAMW, b2=0.999, moment_dtype=dtype)
    one = jax.tree.map(jnp.ones_like, draw(0))
    grads = [one] + [jax.tree.map(lambda g: g * 1e-3, one)] * 300
    (_, state) = take_steps(config, draw(0), 301, grads=grads)[-1]
    for name in INFOS:
        (nu,) = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                state.transform, is_leaf=is_eight_bits
            )
            if f".nu['{name}']" in jax.tree_util.keystr(path)
        ]
        nu = from_eight_bits(nu) if is_eight_bits(nu) else nu
        mean = float(np.asarray(nu, np.float64).mean())
        assert mean == pytest.approx(0.001 * 0.999**300, rel=0.05), name


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_all_moments_are_kept_in_eight_bits_and_steps_are_near_float32(config):
    params = draw(0)
    (exact, _), (ours, state) = (
        take_steps(replace(config, moment_dtype=dtype), params, 6)[-1]
        for dtype in (MomentDtype.float32, MomentDtype.int8)
    )
    sizes = {leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.size > 12}
    assert sizes == {1}
    for name, param in params.items():
        moved = np.linalg.norm(exact[name] - param)
        assert np.linalg.norm(ours[name] - exact[name]) < 0.1 * moved, name
        assert np.linalg.norm(ours[name] - exact[name]) > 0


def test_weights_in_bfloat16_move_by_updates_below_half_a_step():
    """The average of them, in float32, moves with them."""
    config = replace(ADAMW, learning_rate=1e-4, weight_decay=0.0, ema_decay=0.5)
    params = {k: jnp.ones((64, 64), jnp.bfloat16) for k in ("matrix", "table")}
    infos = {k: INFOS[k] for k in params}
    grads = [jax.tree.map(jnp.ones_like, params)] * 20  # each moves by the rate
    found, state = take_steps(config, params, 20, infos=infos, grads=grads)[-1]
    for name, param in found.items():
        assert param.dtype == jnp.bfloat16
        assert float(jnp.mean(param.astype(jnp.float32))) == pytest.approx(
            1 - 20e-4, abs=2e-4
        )
        average = state.average[name]
        assert average.dtype == jnp.float32
        assert float(jnp.mean(average)) == pytest.approx(1 - 19e-4, abs=3e-4)


def infos_of(layers: range) -> dict:
    matrix = ParamInfo(("layers", "embed", "mlp"), Kind.matrix, 1, layers=layers)
    vector = ParamInfo(("layers", "embed"), Kind.vector, layers=layers)
    return {"matrix": matrix, "vector": vector}


def test_random_bits_do_not_depend_on_how_layers_are_grouped():
    """Six layers in one stack, or in a pattern of two places after two layers."""
    weights = draw(0, {"matrix": (6, 8, 12), "vector": (6, 8)})
    places = (range(2), range(2, 6, 2), range(3, 6, 2))

    def rounded(tree: dict, layers: dict, repeat: int = 0) -> dict:
        infos = {segment: dict(place) for segment, place in layers.items()}
        storage = MomentStorage(MomentDtype.bfloat16, {"layers": infos}, seed=0)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        args = {"layers": tree}, {"layers": params}, jnp.int32(3), repeat
        return storage.round_weights(*args)["layers"]

    whole = rounded({"0": {"0": weights}}, {"0": {"0": infos_of(range(6))}})["0"]["0"]
    own = [jax.tree.map(lambda x, p=p: x[np.array(p)], weights) for p in places]
    trees = {"0": {"0": own[0]}, "1": {"0": own[1], "1": own[2]}}
    infos = [infos_of(place) for place in places]
    found = rounded(trees, {"0": {"0": infos[0]}, "1": {"0": infos[1], "1": infos[2]}})
    parts = found["0"]["0"], found["1"]["0"], found["1"]["1"]
    for place, part in zip(places, parts, strict=True):
        for name, x in part.items():
            np.testing.assert_array_equal(x, whole[name][np.array(place)])
    last = {"1": jax.tree.map(lambda x: x[1:], trees["1"])}
    layers = {"1": {"0": infos[1], "1": infos[2]}}
    again = rounded(last, layers, repeat=jnp.int32(1))
    for x, y in zip(*map(jax.tree.leaves, (again["1"], found["1"])), strict=True):
        np.testing.assert_array_equal(x, y[1:])


def test_an_update_by_layers_is_that_of_all_at_once():
    """As GPUs update moments of eight bits."""
    places = {"0": infos_of(range(0, 6, 2)), "1": infos_of(range(1, 6, 2))}
    table = ParamInfo(("vocab", "embed"), Kind.table)
    infos = {"layers": {"0": places}, "table": table}
    layers = {"matrix": (3, 8, 12), "vector": (3, 8)}

    def drawn(seed: int) -> dict:
        places = {"0": draw(seed, layers), "1": draw(seed + 9, layers)}
        return {"layers": {"0": places}, **draw(seed, {"table": (10, 8)})}

    config = replace(ADAMW, moment_dtype=MomentDtype.int8)
    results = []
    for platform in ("cpu", "gpu"):
        optimizer = make_optimizer(config, LEVEL, 3, infos, platform=platform)
        assert (optimizer.update_layers is not None) == (platform == "gpu")
        params = drawn(0)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for step in range(3):
            params, state, _ = update(drawn(step + 1), 1.0, state, params, step)
        results.append(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *results)
