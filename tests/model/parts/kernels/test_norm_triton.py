"""The Triton kernels of norms give the norms and gradients of `Normalize`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.choices import Norm
from model.config import ModelConfig
from model.execution import Execution
from model.layers import Normalize
from model.parts.kernels import norm_triton
from model.parts.kernels.norm_triton import choose_norm

# 37 rows fill no block of rows, and most of these dims are no power of two.
SHAPES = [(1, 37, 96), (3, 700, 768), (2, 1, 64), (1, 1, 5000)]


def make_norm(kind: Norm, D: int, **fields) -> Normalize:
    config = replace(ModelConfig(), norm=kind, **fields)
    norm = Normalize(config, kind, rows=D)
    rng = np.random.default_rng(0)
    for param in filter(None, (norm.scale, norm.bias)):
        param[...] = jnp.float32(rng.normal(size=D))
    return norm


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Norm.layernorm, {"bias": True}),
        (Norm.layernorm, {"bias": False}),
        (Norm.rmsnorm, {"norm_unit_offset": True}),
    ],
)
def test_a_kernel_gives_the_norm_and_all_gradients(shape, kind, fields):
    norm = make_norm(kind, shape[-1], **fields)
    rng = np.random.default_rng(1)
    x, dkept, dy = (jnp.float32(1 + rng.normal(size=shape)) for _ in range(3))
    graph, params = nnx.split(norm)
    kernel = partial(norm_triton.normalize, interpret=True)

    def run(execution: Execution):
        def call(params, x):
            return nnx.merge(graph, params).keep_input(x, execution)

        results, transpose = jax.vjp(call, params, x)
        return results, transpose((dkept, dy))

    expected = run(Execution())
    actual = run(Execution(normalize=kernel))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_a_kernel_rounds_only_its_results():
    norm = make_norm(Norm.rmsnorm, 96)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 96)), jnp.bfloat16)
    kernel = partial(norm_triton.normalize, interpret=True)
    kept, y = norm.keep_input(x, Execution(normalize=kernel))
    assert kept.dtype == y.dtype == jnp.bfloat16
    exact = norm(x.astype(jnp.float32))
    np.testing.assert_allclose(y, exact, rtol=2**-8)


def test_gpus_take_the_kernel_for_rows_that_fit():
    assert choose_norm("gpu", 768) is norm_triton.normalize
    assert choose_norm("gpu", 8192) is norm_triton.normalize
    assert choose_norm("gpu", 12288) is None
    assert choose_norm("tpu", 768) is None
    assert choose_norm("cpu", 768) is None
