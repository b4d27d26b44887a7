"""What a layer keeps is what the step's own loop over the layers keeps."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from model.axes import ANYWHERE
from model.config import Activation, Attention, ModelConfig
from model.layers import Execution
from train.plan.estimated.residuals import kept

B, T, D, N, K, H, F = 2, 128, 64, 4, 2, 16, 192
MODEL = ModelConfig(
    num_layers=3, num_heads=N, num_kv_heads=K, embed_dim=D, mlp_dim=F, vocab_size=512
)
BF16 = jnp.dtype(jnp.bfloat16)


def how(remat: str, attention: Attention = Attention.splash) -> Execution:
    return Execution(BF16, BF16, attention, remat)


def sizes(remat: str, **options) -> list[tuple[int, ...]]:
    return sorted(r.shape for r in kept(MODEL, how(remat, **options), B, T, True))


def test_full_keeps_the_input():
    (x,) = kept(MODEL, how("full"), B, T, True)
    assert (x.shape, x.dtype, x.num_bytes) == ((B, T, D), BF16, 2 * B * T * D)


def test_dots_keeps_the_products_with_weights_too():
    """Query, key, value, the output's, up and gate; not down, which is only added."""
    heads = [(B, T, N, H), (B, T, K, H), (B, T, K, H)]
    assert sizes("dots") == sorted([*heads, *[(B, T, D)] * 2, *[(B, T, F)] * 2])


@pytest.mark.parametrize("attention", [Attention.splash, Attention.cudnn])
def test_kernels_keep_a_sum_for_each_query_and_no_scores(attention):
    arrays = kept(MODEL, how("none", attention), B, T, True)
    assert not [r for r in arrays if r.shape[-2:] == (T, T)]
    (sums,) = (r for r in arrays if r.shape == (B, N, T))
    assert sums.dtype == jnp.float32


def test_plain_attention_keeps_scores():
    assert (B, K, N // K, T, T) in sizes("none", attention=Attention.xla)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_step_keeps_as_much(programs, remat, activation):
    """The loop over the layers gives, besides features, what it kept of each."""
    program = programs(f"train.remat={remat}", f"model.activation={activation}")
    config, execution = program.config.model, program.how._replace(rules=ANYWHERE)
    assert config.activation is Activation(activation)
    rows, length = program.batch.inputs.shape
    with jax.set_mesh(program.mesh):
        traced = program.train_step.trace(program.state, program.batch)
    L = config.num_layers
    stacked = next(loops(traced.jaxpr.jaxpr, L))
    large = [v.aval for v in stacked if math.prod(v.aval.shape) >= L * rows * length]
    expected = kept(config, execution, rows, length, True)
    assert sum(a.size * a.dtype.itemsize for a in large) == L * sum(
        r.num_bytes for r in expected
    )


def loops(jaxpr, length):
    """Give what each loop of so many trips puts together, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == length:
            yield [v for v in equation.outvars if v.aval.shape[:1] == (length,)]
        for inner in jaxprs_in_params(equation.params):
            yield from loops(inner, length)
