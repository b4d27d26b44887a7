"""Some layers keep their products in high precision while others use eight bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.catalog import MODEL_PARTS
from model.choices import ComputeDtype, Position
from model.config import ModelConfig
from model.execution import CallContext, Execution, Numerics
from model.parts.eight_bits.recipes import RECIPES
from model.pattern import segments_of
from model.segments import LayerFlags, draw_layer_keys, make_segment, run_segment
from model.taps import Taps

CONFIG = ModelConfig(
    num_layers=3,
    num_heads=2,
    embed_dim=16,
    mlp_dim=24,
    position=Position.learned,
    compute_dtype=ComputeDtype.float8,
    high_precision_layers=("first",),
)
FLAGS = CONFIG.high_precision_flags
FLOAT8 = RECIPES[ComputeDtype.float8](emulated=True)
EIGHT = Execution(numerics=Numerics(quantization=FLOAT8))


@pytest.fixture(scope="module")
def stack():
    (segment,) = segments_of(CONFIG)
    keys = draw_layer_keys(CONFIG, nnx.Rngs(0))
    return nnx.split(make_segment(CONFIG, segment, keys, MODEL_PARTS)["0"])


@pytest.fixture(scope="module")
def x_BTD():
    return jax.random.normal(jax.random.key(1), (2, 8, 16))


def run(graph, params, x_BTD, execution, precise, taps=None):
    block = nnx.merge(graph, params)
    x_BTD, *_ = run_segment(
        [block],
        x_BTD,
        execution,
        CallContext(taps=taps),
        flags=LayerFlags([False] * len(precise), precise),
        unroll=1,
    )
    return x_BTD


def run_one_by_one(graph, params, x_BTD):
    for i, precise in enumerate(FLAGS):
        layer_params = jax.tree.map(lambda p, i=i: p[i : i + 1], params)
        execution = Execution() if precise else EIGHT
        x_BTD = run(graph, layer_params, x_BTD, execution, [False])
    return x_BTD


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_multiplies_in_its_own_precision(stack, x_BTD, remat):
    graph, params = stack
    execution = EIGHT._replace(remat=remat)

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda p: jnp.sum(function(p) ** 2)))

    actual, grads = loss(lambda p: run(graph, p, x_BTD, execution, FLAGS))(params)
    expected, expected_grads = loss(lambda p: run_one_by_one(graph, p, x_BTD))(params)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), grads, expected_grads
    )


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_no_weight_is_saved_a_second_time(stack, x_BTD, remat):
    """A branch stacks the arguments that it saves, so it must save no weight."""
    graph, params = stack

    def saved_shapes(precise):
        execution = EIGHT._replace(remat=remat)
        step = jax.grad(lambda p: jnp.sum(run(graph, p, x_BTD, execution, precise)))
        loops = [
            e for e in jax.make_jaxpr(step)(params).eqns if e.primitive.name == "scan"
        ]
        forward, _ = loops
        return sorted(str(v.aval) for v in forward.outvars if v.aval.ndim > 2)

    shapes = saved_shapes(FLAGS)
    assert not any("[3,16,24]" in array or "[3,24,16]" in array for array in shapes)
    # Without recomputation, activations that both branches make are saved elsewhere.
    if remat != "none":
        assert shapes == saved_shapes([False] * 3)


def test_precise_layers_round_nothing(stack, x_BTD):
    """The largest value of each row becomes int8's largest, so rounding is visible."""
    int8 = RECIPES[ComputeDtype.int8](emulated=True)
    taps = Taps()
    execution = Execution(numerics=Numerics(quantization=int8))
    run(*stack, x_BTD, execution, FLAGS, taps)
    saturated = np.asarray(taps.all_figures().shares["saturated"])
    assert (saturated > 0).tolist() == [not precise for precise in FLAGS]
