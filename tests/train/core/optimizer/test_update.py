"""AdamW, Lion and Muon follow their papers, with clipping and averaging."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.config import ModelConfig
from model.params import Kind, ParamInfo
from train.config import (
    MuonScale,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    ScheduleConfig,
)
from train.core.optimizer.schedule import make_schedule
from train.core.optimizer.update import Optimizer
from train.optimizers.catalog import OPTIMIZERS
from train.resolve.optimizer import make_optimizer

INFOS = {
    "matrix": ParamInfo(("embed", "mlp"), Kind.matrix, 1),
    "table": ParamInfo(("vocab", "embed"), Kind.table),
    "vector": ParamInfo(("embed",), Kind.vector),
}
SHAPES = {"matrix": (8, 12), "table": (10, 8), "vector": (8,)}
ADAMW = OptimizerConfig(
    learning_rate=0.01, weight_decay=0.1, b1=0.9, b2=0.95, clip_norm=None
)
MUON = replace(ADAMW, name=OptimizerName.muon, muon_learning_rate=0.1)
LEVEL = ScheduleConfig(name=Schedule.constant, warmup_steps=0)
WARMING = ScheduleConfig(name=Schedule.cosine, warmup_steps=3, final_fraction=0.1)


def draw(seed: int, shapes=SHAPES) -> dict:
    rng = np.random.default_rng(seed)
    return {k: jnp.array(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def optimizer_of(
    config: OptimizerConfig,
    num_steps: int,
    infos=INFOS,
    *,
    schedule: ScheduleConfig = LEVEL,
    platform: str = "cpu",
) -> Optimizer:
    """Return the optimizer of a config, for parameters that belong to no model."""
    return make_optimizer(
        config,
        schedule,
        num_steps,
        parts=OPTIMIZERS,
        model=ModelConfig(),
        infos=infos,
        platform=platform,
    )


def take_steps(config, params, num_steps, schedule=LEVEL, infos=INFOS, grads=None):
    """Return the parameters and the state after each step."""
    optimizer = optimizer_of(config, num_steps, infos, schedule=schedule)
    state = optimizer.init(params)
    history = []
    update = jax.jit(optimizer.update)
    for step in range(num_steps):
        gradient = grads[step] if grads else draw(step + 1)
        norm = optax.tree.norm(gradient)
        params, state, _ = update(gradient, norm, state, params, step)
        history.append((params, state))
    return history


def test_adamw_is_the_papers_with_decay_of_matrices_and_tables_only():
    """The source is Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 (float64)."""
    params = draw(0)
    ours = take_steps(ADAMW, params, 6, WARMING)
    schedule = make_schedule(WARMING, 6)
    for name in SHAPES:
        theta = np.float64(params[name])
        m = v = np.zeros_like(theta)
        decay = 0.0 if name == "vector" else ADAMW.weight_decay
        for t in range(1, 7):
            g = np.float64(draw(t)[name])
            m = ADAMW.b1 * m + (1 - ADAMW.b1) * g
            v = ADAMW.b2 * v + (1 - ADAMW.b2) * g**2
            m_hat = m / (1 - ADAMW.b1**t)
            v_hat = v / (1 - ADAMW.b2**t)
            rate = ADAMW.learning_rate * float(schedule(t - 1))
            step = m_hat / (np.sqrt(v_hat) + ADAMW.epsilon) + decay * theta
            theta = theta - rate * step
            np.testing.assert_allclose(ours[t - 1][0][name], theta, rtol=2e-5)


def test_lion_is_the_papers():
    """The source is Chen et al., arXiv:2302.06675, algorithm 2 (float64)."""
    config = replace(ADAMW, name=OptimizerName.lion, b2=0.99)
    params = draw(0)
    ours = take_steps(config, params, 4)
    for name in SHAPES:
        theta = np.float64(params[name])
        m = np.zeros_like(theta)
        decay = 0.0 if name == "vector" else 0.1
        for t in range(1, 5):
            g = np.float64(draw(t)[name])
            direction = np.sign(config.b1 * m + (1 - config.b1) * g)
            theta = theta - config.learning_rate * (direction + decay * theta)
            m = config.b2 * m + (1 - config.b2) * g
            np.testing.assert_allclose(ours[t - 1][0][name], theta, rtol=2e-5)


def muon_update(stack: jax.Array, info: ParamInfo, grads: jax.Array) -> jax.Array:
    params = {"w": stack}
    infos = {"w": info}
    ((new, _),) = take_steps(MUON, params, 1, infos=infos, grads=[{"w": grads}])
    return stack - new["w"]


def test_muon_of_stacked_layers_is_muon_of_each_layer():
    rng = np.random.default_rng(0)
    weights, grads = jnp.array(rng.normal(size=(2, 3, 8, 16)), jnp.float32)
    grads *= jnp.array([1.0, 10.0, 0.1])[:, None, None]  # A shared norm would show.
    axes = ("embed", "mlp")
    stacked = muon_update(weights, ParamInfo(("layers", *axes), Kind.matrix, 1), grads)
    for layer in range(3):
        alone = muon_update(
            weights[layer], ParamInfo(axes, Kind.matrix, 1), grads[layer]
        )
        np.testing.assert_allclose(stacked[layer], alone, atol=2e-6)
        singular = np.linalg.svd(alone, compute_uv=False)
        expected = MUON.muon_learning_rate * 2**0.5  # sqrt(16 / 8)
        assert (singular > 0.6 * expected).all()
        assert (singular < 1.3 * expected).all()


@pytest.mark.parametrize(("inputs", "flat"), [(1, (8, 12)), (2, (24, 4))])
def test_muon_flattens_heads_into_a_matrix(inputs, flat):
    rng = np.random.default_rng(0)
    shape = (8, 3, 4) if inputs == 1 else (3, 8, 4)
    weight, grads = jnp.array(rng.normal(size=(2, *shape)), jnp.float32)
    heads = muon_update(weight, ParamInfo(("a", "b", "c"), Kind.matrix, inputs), grads)
    info = ParamInfo(("a", "b"), Kind.matrix, 1)
    matrix = muon_update(weight.reshape(flat), info, grads.reshape(flat))
    np.testing.assert_allclose(heads.reshape(flat), matrix, atol=2e-6)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Iterate as in kellerjordan.github.io/posts/muon (Newton-Schulz), in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


# Each value has the axes, shape and inputs of a layer, and whether it has heads.
PROJECTIONS = {
    "query": (("embed", "heads", "head_dim"), (8, 4, 6), 1, True),
    "key": (("embed", "kv_heads", "head_dim"), (8, 2, 6), 1, True),
    "beta": (("embed", "heads"), (8, 4), 1, False),
    "output": (("heads", "head_dim", "embed"), (4, 6, 8), 2, False),
    "up": (("embed", "mlp"), (8, 12), 1, False),
}


FACTORS = {
    MuonScale.spectral: lambda i, o: np.sqrt(max(1, o / i)),
    MuonScale.rms: lambda i, o: 0.2 * np.sqrt(max(i, o)),
}


def follow_muon(theta: np.ndarray, grads: list[np.ndarray], config) -> np.ndarray:
    """Return a matrix after Muon's updates, in float64."""
    momentum = np.zeros_like(theta)
    mu = config.muon_momentum
    factor = FACTORS[config.muon_scale](*theta.shape)
    for grad in grads:
        momentum = mu * momentum + grad
        step = factor * orthogonal(grad + mu * momentum)
        step += config.muon_weight_decay * theta
        theta = theta - config.muon_learning_rate * step
    return theta


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("scale", MuonScale)
def test_muon_is_the_papers(scale, per_head):
    """The sources are arXiv:2502.16982, equation 4 (rms), and 2602.15763 (heads)."""
    options = {"muon_scale": scale, "muon_per_head": per_head}
    config = replace(MUON, muon_weight_decay=0.1, **options)
    infos = {
        name: ParamInfo(("layers", *axes), Kind.matrix, inputs)
        for name, (axes, _, inputs, _) in PROJECTIONS.items()
    }
    shapes = {name: (2, *shape) for name, (_, shape, *_) in PROJECTIONS.items()}
    params = draw(0, shapes)
    grads = [draw(seed, shapes) for seed in (1, 2)]
    ours = take_steps(config, params, 2, infos=infos, grads=grads)[-1][0]
    for name, (_, shape, inputs, has_heads) in PROJECTIONS.items():
        fan_in = np.prod(shape[:inputs])
        num = shape[1] if has_heads and per_head else 1
        for layer in range(2):
            new, theta, *gradients = (
                np.split(np.float64(tree[name][layer]).reshape(fan_in, -1), num, 1)
                for tree in (ours, params, *grads)
            )
            for head in range(num):
                head_grads = [grad[head] for grad in gradients]
                expected = follow_muon(theta[head], head_grads, config)
                np.testing.assert_allclose(new[head], expected, atol=1e-6, err_msg=name)


def test_muon_is_for_matrices_only():
    params = draw(0)
    muon, adamw = (take_steps(c, params, 3)[-1][0] for c in (MUON, ADAMW))
    for name in SHAPES:
        is_equal = np.array_equal(muon[name], adamw[name])
        assert is_equal == (name != "matrix"), name


@pytest.mark.parametrize("length", [0.5, 10.0])
def test_only_a_gradient_longer_than_the_limit_is_clipped(length):
    grads = draw(1)
    grads = jax.tree.map(lambda g: g * length / optax.tree.norm(draw(1)), grads)
    config = replace(ADAMW, clip_norm=1.0)
    ((_, state),) = take_steps(config, draw(0), 1, grads=[grads])
    scale = min(1.0, 1 / length)
    for name, mu in optax.tree_utils.tree_get(state.transform, "mu").items():
        expected = (1 - ADAMW.b1) * scale * grads[name]
        np.testing.assert_allclose(mu, expected, rtol=1e-5)


def test_the_average_follows_the_weights():
    params = draw(0)
    average = params
    for new, state in take_steps(replace(ADAMW, ema_decay=0.8), params, 4):
        average = jax.tree.map(lambda a, p: 0.8 * a + 0.2 * p, average, new)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            state.average,
            average,
        )
    assert take_steps(ADAMW, params, 1)[0][1].average is None


def assert_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", OptimizerName)
def test_an_update_that_overflows_writes_nothing(name):
    """Gradients are finite, and so is the first step; the second has a huge rate."""
    config = replace(ADAMW, name=name, ema_decay=0.9)
    steep_config = replace(config, learning_rate=3e38, muon_learning_rate=3e38)
    optimizer, overflowing = (
        optimizer_of(variant, 2) for variant in (config, steep_config)
    )
    params = draw(0)
    state = optimizer.init(params)
    grads = draw(1)
    norm = optax.tree.norm(grads)
    params, state, accepted = optimizer.update(grads, norm, state, params, 0)
    assert accepted
    *result, accepted = overflowing.update(grads, norm, state, params, 1)
    assert not accepted
    assert_equal(result, [params, state])


def checks_overflow(config) -> bool:
    return optimizer_of(config, 1).checks_overflow


def test_only_updates_that_may_overflow_are_checked():
    """The check reads the state an extra time. The other updates have a bound."""
    configs = {name: replace(ADAMW, name=name, clip_norm=1.0) for name in OptimizerName}
    checked_names = {
        name for name, config in configs.items() if checks_overflow(config)
    }
    assert checked_names == {OptimizerName.adafactor}
    for name, config in configs.items():
        if name is not OptimizerName.lion:
            assert checks_overflow(replace(config, clip_norm=None))
        assert checks_overflow(replace(config, learning_rate=1e30))
        assert checks_overflow(replace(config, weight_decay=1e4))  # Weights would grow.
    assert checks_overflow(
        replace(configs[OptimizerName.muon], muon_learning_rate=1e30)
    )
