"""Rates transfer from a small model to a larger one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.params import named
from tests.train.conftest import Programs
from train.cli.rules import config_mistakes
from train.config import OptimizerConfig
from train.optimizers.transfer import fit_to_length

# The model's width and depth, divided by those of the base.
WIDTH = 4.0
DEPTH = 2.0
MODEL = (
    *("model.embed_dim=64", "model.num_layers=4", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.init=scaled", "model.tied_head=false"),
)
BASE = ("optimizer.base_width=16", "optimizer.base_depth=2")
TRANSFER = (*MODEL, "optimizer.transfer=completep", *BASE)
ADAMW = ("optimizer=adamw", "optimizer.weight_decay=0.3", "optimizer.epsilon=0.01")


def paper_factors(name: str) -> tuple[float, float, float, float]:
    """Return a parameter's multiplier, and factors on rate, decay and epsilon.

    The source is Dey et al., arXiv:2505.01618, table 1, with alpha = 1.
    """
    if name.startswith("head"):
        return 1 / WIDTH, 1.0, 1.0, 1 / WIDTH
    if name.startswith("embedding") or name == "norm.scale":
        return 1.0, 1.0, 1.0, 1 / WIDTH
    ends_branch = "attention.output" in name or "mlp.down" in name
    multiplier = 1 / DEPTH if ends_branch else 1.0
    epsilon = 1 / (WIDTH * DEPTH)
    if name.endswith("weight"):
        return multiplier, 1 / WIDTH, WIDTH, epsilon
    return multiplier, 1.0, 1.0, epsilon


@pytest.mark.slow
def test_adamw_with_multipliers_on_branches_and_logits_computes_the_same(
    programs: Programs,
):
    """The paper's weight, times its multiplier, is our weight after two updates."""
    program = programs([*TRANSFER, *ADAMW, "model.bias=true", "schedule=constant"])
    optimizer = program.optimizer
    config = program.config.optimizer
    params = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape),
        program.state.params,
    )
    state = optimizer.init(params)
    new_params = params
    grads = [jax.tree.map(lambda x, s=s: jnp.sin(s * x), params) for s in (3, 7)]
    for step, grad in enumerate(grads):
        norm = optax.tree.norm(grad)
        new_params, state, _ = optimizer.update(
            grad, norm, state, new_params, step + 100
        )
    infos = dict(named(program.infos, lambda x: hasattr(x, "kind")))
    clips = [min(1.0, 1 / (float(optax.tree.norm(g)) + 1e-6)) for g in grads]
    gradients = [dict(named(grad)) for grad in grads]
    initial = dict(named(params))
    new_params = dict(named(new_params))
    for name, value in initial.items():
        multiplier, rate, decay, epsilon = paper_factors(name)
        adamw = optax.adamw(
            config.learning_rate * rate,
            config.b1,
            config.b2,
            config.epsilon * epsilon,
            weight_decay=0 if infos[name].kind == "vector" else 0.3 * decay,
        )
        theirs = value / multiplier
        theirs_state = adamw.init(theirs)
        for grad, clip in zip(gradients, clips, strict=True):
            updates, theirs_state = adamw.update(
                multiplier * clip * grad[name], theirs_state, theirs
            )
            theirs += updates
        np.testing.assert_allclose(
            new_params[name], multiplier * theirs, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("init", ["gpt2", "scaled", "zero"])
def test_initial_stds_are_those_of_the_base(programs: Programs, init: str):
    keys = (f"model.init={init}", *ADAMW)
    large = programs([*TRANSFER, *keys]).init().params
    base = ("model.embed_dim=16", "model.num_layers=2", "model.num_heads=1")
    base = programs([*MODEL, *base, "model.num_kv_heads=1", *keys]).init().params
    for (name, x), (_, y) in zip(named(large), named(base), strict=True):
        multiplier, rate, *_ = paper_factors(name)
        expected = float(jnp.std(y)) * multiplier * rate**0.5
        assert float(jnp.std(x)) == pytest.approx(expected, rel=0.25, abs=1e-6), name


def test_a_branch_that_ends_with_a_norm_is_scaled_by_it(programs: Programs):
    keys = ("model.norm_placement=after", "model.norm_unit_offset=true", *ADAMW)
    program = programs([*TRANSFER, *keys])
    params = dict(named(program.init().params))
    factors = program.optimizer.factors
    ends = [name for name in params if name.endswith("output_norm.scale")]
    assert len(ends) == 2
    for name in ends:
        np.testing.assert_allclose(params[name], 1 / DEPTH - 1)
        assert factors[name].learning_rate == 1 / DEPTH
    assert factors["layers.0.0.mlp.down.weight"].learning_rate == 1 / WIDTH


@pytest.mark.parametrize(
    ("init", "std"), [("scaled", 1.0), ("gpt2", WIDTH**-0.5), ("zero", 1.0)]
)
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("model.bias=true",),
        ("model.predict_ahead=2",),
        ("model.num_experts=4", "model.experts_per_token=2", "model.shared_experts=1"),
        ("model.norm_placement=after",),
        ("model.norm_placement=both",),
    ],
)
def test_the_block_of_a_prediction_module_is_scaled_like_a_layer(
    programs: Programs, init: str, std: float, keys: tuple[str, ...]
):
    depth = () if "model.predict_ahead=2" in keys else ("model.predict_ahead=1",)
    overrides = (f"model.init={init}", *keys, *depth, *ADAMW)
    factors = programs([*TRANSFER, *overrides]).optimizer.factors
    block = "predict_ahead.0.block."
    names = [name for name in factors if name.startswith(block)]
    for name in names:
        layer_factors = factors["layers.0.0." + name.removeprefix(block)]
        assert factors[name] == layer_factors, name
    if "model.norm_placement=after" not in keys and "both" not in str(keys):
        expected = std / DEPTH**0.5, 1 / (WIDTH * DEPTH), 1 / WIDTH
        assert factors[block + "attention.output.weight"] == pytest.approx(expected)
    projection = factors["predict_ahead.0.projection.weight"]
    assert projection == (std, 1 / WIDTH, 1 / WIDTH)


def test_a_tied_head_is_scaled_by_the_last_norm(programs: Programs):
    keys = ("model.tied_head=true", "model.predict_ahead=1", *ADAMW)
    program = programs([*TRANSFER, *keys])
    factors = program.optimizer.factors
    for name in ("norm.scale", "predict_ahead.0.norm.scale"):
        assert factors[name] == (1 / WIDTH, 1 / WIDTH, 1)
    assert factors["predict_ahead.0.hidden_norm.scale"].learning_rate == 1
    assert factors["embedding.weight"].learning_rate == 1
    np.testing.assert_allclose(program.init().params["norm"]["scale"], 1 / WIDTH)


def test_a_model_of_the_base_size_does_not_change(programs: Programs):
    base = ("optimizer.base_width=64", "optimizer.base_depth=4")
    program = programs([*MODEL, "optimizer.transfer=completep", *base, *ADAMW])
    assert {*program.optimizer.factors.values()} == {(1.0, 1.0, 1.0)}


@pytest.mark.parametrize(("scale", "rate"), [("spectral", 1.0), ("rms", WIDTH**-0.5)])
def test_muons_rate_follows_the_norm_of_its_update(
    programs: Programs, scale: str, rate: float
):
    keys = ("optimizer=muon", f"optimizer.muon_scale={scale}")
    factors = programs([*TRANSFER, *keys]).optimizer.factors
    assert factors["layers.0.0.mlp.up.weight"].learning_rate == rate
    assert factors["layers.0.0.mlp.down.weight"].learning_rate == rate / DEPTH


def test_a_longer_run_follows_the_same_equation():
    """The noise and the decay of a token stay the same (arXiv:2512.22382)."""
    config = OptimizerConfig(learning_rate=0.01, base_steps=1000)
    ours = fit_to_length(config, 4000)
    assert ours.learning_rate == pytest.approx(0.005)
    assert 4 * ours.learning_rate * ours.weight_decay == pytest.approx(0.01 * 0.1)
    assert 4 * (1 - ours.b1) == pytest.approx(1 - config.b1)
    assert 4 * (1 - ours.b2) == pytest.approx(1 - config.b2)
    assert ours.epsilon == pytest.approx(2 * config.epsilon)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["optimizer.transfer=completep"], "optimizer.base_width"),
        (["optimizer=muon", "optimizer.base_steps=100"], "optimizer.base_steps"),
        (
            ["optimizer=adafactor", "optimizer.transfer=completep", *BASE],
            "optimizer.transfer",
        ),
        (
            ["optimizer=adamw", "optimizer.base_steps=999", "train.num_steps=20"],
            "optimizer.base_steps",
        ),
    ],
)
def test_a_transfer_without_its_base_is_refused(configure, keys, key):
    assert key in [mistake.key for mistake in config_mistakes(configure(keys))]
