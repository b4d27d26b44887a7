"""Products with rounded operands, and their gradients, agree with einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.products import product

pytestmark = pytest.mark.usefixtures("strict")

SPECS = {
    "btd,df->btf": ((2, 5, 8), (8, 6)),
    "btd,dnh->btnh": ((2, 5, 8), (8, 3, 4)),
    "btnh,nhd->btd": ((2, 5, 3, 4), (3, 4, 8)),
    "btd,vd->btv": ((2, 5, 8), (7, 8)),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("compute", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)]
)
@pytest.mark.parametrize(
    "dtypes", [("f4", "f4"), ("bfloat16", "f4"), ("f4", "bfloat16")]
)
def test_values_and_gradients_are_those_of_an_einsum(spec, compute, tolerance, dtypes):
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape, dtype in zip(SPECS[spec], dtypes, strict=True)
    )
    y, pull_back = jax.vjp(lambda a, b: product(spec, a, b, compute), a, b)
    dy = jnp.asarray(rng.normal(size=y.shape), y.dtype)
    da, db = pull_back(dy)
    assert (y.dtype, da.dtype, db.dtype) == (a.dtype, a.dtype, b.dtype)
    if "bfloat16" in dtypes:
        tolerance = 2**-7

    lhs, rhs = spec.split("->")[0].split(",")
    result = spec.split("->")[1]
    exact = {"a": a, "b": b, "dy": dy}
    exact = {name: np.asarray(x, np.float64) for name, x in exact.items()}
    for actual, equation, operands in (
        (y, spec, ("a", "b")),
        (da, f"{result},{rhs}->{lhs}", ("dy", "b")),
        (db, f"{lhs},{result}->{rhs}", ("a", "dy")),
    ):
        expected = np.einsum(equation, *(exact[name] for name in operands))
        # The error of rounding the operands and the result is relative to the sum of
        # the terms' sizes, not to a sum that may cancel.
        terms = np.einsum(equation, *(abs(exact[name]) for name in operands))
        error = abs(np.asarray(actual, np.float64) - expected)
        assert (error <= tolerance * terms).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operands_are_rounded_and_sums_are_not(dtype):
    ones = jnp.ones((1, 1, 1024), dtype)
    assert product("btd,df->btf", ones, jnp.ones((1024, 1)), jnp.bfloat16) == 1024
    value = jnp.float32(1 + 2**-12)  # bfloat16 has 8 bits of precision.
    a = jnp.full((1, 1, 1), value)
    b = jnp.full((1, 1), value)
    assert product("btd,df->btf", a, b, jnp.bfloat16) == 1
    assert product("btd,df->btf", a, b, jnp.float32) > 1
    gradient = jax.grad(
        lambda a: (value * product("btd,df->btf", a, b, jnp.bfloat16)).sum()
    )
    assert gradient(a) == 1, "the cotangent must be rounded too"
