"""Rows are multiplied by the matrix of their group in the body of each platform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.choices import ComputeDtype, Grouped
from model.parts.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.parts.eight_bits.recipes import RECIPES
from model.parts.experts import grouped, grouped_triton
from model.parts.experts.grouped import grouped_product

M = 200
D = 24
F = 40
SIZES = {  # The last rows may belong to no group.
    "mixed": [33, 0, 70, 1, 60],
    "all": [0, 0, 200, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "full": [40, 40, 40, 40, 40],
}


@pytest.fixture
def interpreted(monkeypatch):
    """Run kernels of other platforms on this one."""
    for name in ("triton_by_rows", "triton_by_experts"):
        body = partial(getattr(grouped_triton, name), interpret=True)
        monkeypatch.setattr(grouped_triton, name, body)
    for name in ("gmm", "tgmm"):
        body = partial(getattr(grouped, name), interpret=True)
        monkeypatch.setattr(grouped, name, body)
    yield
    # Other tests must not reuse functions that were traced here.
    grouped.grouped_rows.clear_cache()
    grouped.grouped_matrices.clear_cache()


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (M, D), (5, D, F), (M, F)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def multiply_each_row(x, w, dy, sizes):
    """Return the product and its gradients in float64, a row at a time."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y = np.zeros_like(dy)
    dx = np.zeros_like(x)
    dw = np.zeros_like(w)
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[row] = x[row] @ w[e]
        dx[row] = w[e] @ dy[row]
        dw[e] += np.outer(x[row], dy[row])
    return y, dx, dw


@pytest.mark.parametrize(
    ("body", "swapped"),
    [*((body, False) for body in Grouped), (Grouped.megablox, True)],
)
def test_values_and_gradients_are_those_of_single_rows(interpreted, body, swapped):
    x, w, dy = operands()

    @jax.jit
    def run(sizes):
        y, pull_back = jax.vjp(
            lambda x, w: grouped_product(
                x, w, sizes, jnp.float32, body, swapped=swapped
            ),
            x,
            w,
        )
        return y, *pull_back(dy)

    for sizes in SIZES.values():
        actual = run(jnp.asarray(sizes, jnp.int32))
        for a, b in zip(actual, multiply_each_row(x, w, dy, sizes), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        y, dx, _ = actual
        assert not y[sum(sizes) :].any()
        assert not dx[sum(sizes) :].any()


@pytest.mark.parametrize("body", Grouped)
def test_operands_are_rounded_and_sums_are_not(interpreted, body):
    value = jnp.float32(1 + 2**-12)  # bfloat16 has 8 bits of precision.
    x = jnp.full((M, D), value)
    w = jnp.full((1, D, F), value)
    sizes = jnp.asarray([M], jnp.int32)

    def total(x, w):
        return (value * grouped_product(x, w, sizes, jnp.bfloat16, body)).sum()

    dx, dw = jax.grad(total, (0, 1))(x, w)
    assert dx.dtype == dw.dtype == jnp.float32
    assert (dx == F).all(), "the cotangent must be rounded too"
    assert (dw == M).all()
    y = grouped_product(x.astype("bfloat16"), w, sizes, jnp.bfloat16, body)
    assert y.dtype == jnp.bfloat16
    assert (y == D).all()


@pytest.mark.parametrize("body", [Grouped.scan, Grouped.ragged])
def test_in_float8_all_three_products_have_rounded_operands(body):
    def round_to_float8(x):
        values, scale = to_float8(x, FORWARD, float8_scale(x, FORWARD))
        return values.astype(jnp.float32) * scale

    x, w, dy = operands()
    sizes = jnp.asarray(SIZES["mixed"], jnp.int32)
    float8 = RECIPES[ComputeDtype.float8](emulated=True)
    y, pull_back = jax.vjp(
        lambda x, w: grouped_product(x, w, sizes, jnp.float32, body, float8), x, w
    )
    expected = multiply_each_row(*map(round_to_float8, (x, w, dy)), SIZES["mixed"])
    for a, b in zip((y, *pull_back(dy)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
