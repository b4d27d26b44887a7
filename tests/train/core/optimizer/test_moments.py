"""Moments in bfloat16 and eight bits are near float64, unbiased and harmless."""

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
    MUON,
    draw,
    optimizer_of,
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

MATRIX = ParamInfo(("layers", "embed", "heads", "head_dim"), Kind.matrix, 1)
SHAPE = (2, 6, 3, 4)


def round_trip(x, signed: bool, step: int = 0) -> np.ndarray:
    """Round an array to eight bits and back."""
    bits = random_bits(key_of_step(0, step), "w", x.shape)
    packed = to_eight_bits(jnp.asarray(x, jnp.float32), MATRIX, signed, bits)
    assert packed.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    return np.asarray(from_eight_bits(packed), np.float64)


def draw_wide_range(signed: bool) -> np.ndarray:
    """Draw numbers that span six orders of magnitude."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-3, 3, size=SHAPE)
    return np.asarray(x if signed else x**2, np.float32).astype(np.float64)


def smaller_maximum(x: np.ndarray) -> np.ndarray:
    """Return for each entry the smaller of its row's and its column's maximum."""
    rows = np.abs(x).max(axis=(2, 3), keepdims=True)
    return np.minimum(rows, np.abs(x).max(axis=1, keepdims=True))


@pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])
def test_eight_bits_are_off_by_less_than_a_step_and_right_on_average(signed):
    """The levels are (c / 127)**2 or (c / 255)**4 times the smaller of two maxima."""
    x = draw_wide_range(signed)
    top, power = (127, 2) if signed else (255, 4)
    share = np.abs(x) / smaller_maximum(x)
    level_below = np.floor(top * share ** (1 / power) * (1 + 1e-6))
    step = (
        ((level_below + 1) / top) ** power - (level_below / top) ** power
    ) * smaller_maximum(x)
    draws = np.stack([round_trip(x, signed, step) for step in range(256)])
    assert (np.abs(draws - x) <= 1.001 * step).all()
    above_lowest_level = share > top**-power  # Smaller squares take the lowest level.
    bias = np.abs(draws.mean(axis=0) - x)
    assert (bias <= 5 * 0.5 * step / 16 + 1e-6 * np.abs(x))[
        above_lowest_level | signed
    ].all()
    assert np.ptp(draws, axis=0).any()


@pytest.mark.parametrize("signed", [True, False], ids=["mean", "square"])
def test_zeros_stay_zero_and_one_huge_entry_coarsens_no_other(signed):
    """Only entries in both its row and its column could suffer; there is no other."""
    zeros = round_trip(np.zeros(SHAPE), signed)
    assert not zeros.any()
    x = np.ones(SHAPE)
    x[:, 0] = 0.0
    x[0, 3, 2, 1] = 1e30
    result = round_trip(x, signed)
    assert not result[:, 0].any()
    np.testing.assert_allclose(result[x > 0], x[x > 0], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, pytest.param(1e15, marks=pytest.mark.slow)])
def test_gradients_of_any_size_move_weights_as_in_float32(size):
    grads = [jax.tree.map(lambda g: g * size, draw(step)) for step in range(1, 5)]
    exact, ours = (
        take_steps(replace(ADAMW, moment_dtype=dtype), draw(0), 4, grads=grads)
        for dtype in (MomentDtype.float32, MomentDtype.int8)
    )
    for (expected, _), (params, _) in zip(exact, ours, strict=True):
        for name, param in params.items():
            error = np.abs(param - expected[name]) / ADAMW.learning_rate
            assert error.max() < 0.2, name  # The step is about 1.


@pytest.mark.parametrize("dtype", [MomentDtype.bfloat16, MomentDtype.int8])
def test_a_mean_follows_float64_though_it_changes_by_less_than_a_step(dtype):
    """If b2 is 0.999, a mean square rounded to the nearest would never fall."""
    config = replace(ADAMW, b2=0.999, moment_dtype=dtype)
    ones = jax.tree.map(jnp.ones_like, draw(0))
    grads = [ones] + [jax.tree.map(lambda g: g * 1e-3, ones)] * 300
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
        distance = np.linalg.norm(exact[name] - param)
        assert np.linalg.norm(ours[name] - exact[name]) < 0.1 * distance, name
        assert np.linalg.norm(ours[name] - exact[name]) > 0


def test_weights_in_bfloat16_move_by_updates_below_half_a_step():
    """Their average, in float32, moves with them."""
    config = replace(ADAMW, learning_rate=1e-4, weight_decay=0.0, ema_decay=0.5)
    params = {k: jnp.ones((64, 64), jnp.bfloat16) for k in ("matrix", "table")}
    infos = {k: INFOS[k] for k in params}
    grads = [jax.tree.map(jnp.ones_like, params)] * 20  # Each moves by the rate.
    new_params, state = take_steps(config, params, 20, infos=infos, grads=grads)[-1]
    for name, param in new_params.items():
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
    """Six layers are in one stack, or in a pattern of two after two layers."""
    weights = draw(0, {"matrix": (6, 8, 12), "vector": (6, 8)})
    groups = (range(2), range(2, 6, 2), range(3, 6, 2))

    def round_all(tree: dict, layers: dict, repeat: int = 0) -> dict:
        infos = {segment: dict(block) for segment, block in layers.items()}
        storage = MomentStorage(MomentDtype.bfloat16, {"layers": infos}, seed=0)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        args = {"layers": tree}, {"layers": params}, jnp.int32(3), repeat
        return storage.round_weights(*args)["layers"]

    stack = round_all({"0": {"0": weights}}, {"0": {"0": infos_of(range(6))}})["0"]["0"]
    slices = [jax.tree.map(lambda x, p=p: x[np.array(p)], weights) for p in groups]
    trees = {"0": {"0": slices[0]}, "1": {"0": slices[1], "1": slices[2]}}
    infos = [infos_of(indices) for indices in groups]
    result = round_all(
        trees, {"0": {"0": infos[0]}, "1": {"0": infos[1], "1": infos[2]}}
    )
    parts = result["0"]["0"], result["1"]["0"], result["1"]["1"]
    for indices, part in zip(groups, parts, strict=True):
        for name, x in part.items():
            np.testing.assert_array_equal(x, stack[name][np.array(indices)])
    last_repeat = {"1": jax.tree.map(lambda x: x[1:], trees["1"])}
    layers = {"1": {"0": infos[1], "1": infos[2]}}
    last_result = round_all(last_repeat, layers, repeat=jnp.int32(1))
    for x, y in zip(
        *map(jax.tree.leaves, (last_result["1"], result["1"])), strict=True
    ):
        np.testing.assert_array_equal(x, y[1:])


def test_an_update_layer_by_layer_equals_one_of_all_layers():
    """GPUs update moments of eight bits layer by layer."""
    blocks = {"0": infos_of(range(0, 6, 2)), "1": infos_of(range(1, 6, 2))}
    table = ParamInfo(("vocab", "embed"), Kind.table)
    infos = {"layers": {"0": blocks}, "table": table}
    layers = {"matrix": (3, 8, 12), "vector": (3, 8)}

    def draw_tree(seed: int) -> dict:
        blocks = {"0": draw(seed, layers), "1": draw(seed + 9, layers)}
        return {"layers": {"0": blocks}, **draw(seed, {"table": (10, 8)})}

    config = replace(ADAMW, moment_dtype=MomentDtype.int8)
    results = []
    for platform in ("cpu", "gpu"):
        optimizer = optimizer_of(config, 3, infos, platform=platform)
        assert (optimizer.update_layers is not None) == (platform == "gpu")
        params = draw_tree(0)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for step in range(3):
            params, state, _ = update(draw_tree(step + 1), 1.0, state, params, step)
        results.append(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *results)
