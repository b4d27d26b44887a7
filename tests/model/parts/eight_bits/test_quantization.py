"""Products of eight-bit operands agree with float64 up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from model.choices import ComputeDtype
from model.gather import UNSHARDED, WeightPlacement
from model.parts.eight_bits.float8 import float8_scale, to_float8
from model.parts.eight_bits.int8 import to_int8
from model.parts.eight_bits.recipes import RECIPES
from model.products import Quantization, gather_weight, product

pytestmark = pytest.mark.usefixtures("strict")

SPECS = {
    "btd,df->btf": ((2, 5, 8), (8, 6)),
    "btd,dnh->btnh": ((2, 5, 8), (8, 3, 4)),
    "btnh,nhd->btd": ((2, 5, 3, 4), (3, 4, 8)),
}
# Each bound is half of a unit in the last place.
E4M3 = 2**-4
E5M2 = 2**-3
INT8 = 0.5 / 127
FLOAT8_FLOOR = 2**-10 / 448  # This is half of e4m3's smallest number, over its largest.


def make_quantization(dtype: str) -> Quantization:
    return RECIPES[ComputeDtype(dtype)](emulated=True)


def keys(rows: int, step: int = 0, length: int = 5):
    seeds = step * rows * length + jnp.arange(rows * length)
    return jax.vmap(jax.vmap(jax.random.key))(seeds.reshape(rows, length))


def run(spec, a, b, dy, dtype, keys_BT=None, placement=UNSHARDED):
    """Return the product and its gradients: (y, da, db)."""

    def multiply(a, b):
        return product(
            spec, a, b, jnp.float32, placement, make_quantization(dtype), keys_BT
        )

    y, pull_back = jax.vjp(multiply, a, b)
    return y, *pull_back(dy)


jitted = jax.jit(run, static_argnums=(0, 4))


def equations(spec):
    lhs, rhs = spec.split("->")[0].split(",")
    result = spec.split("->")[1]
    return spec, f"{result},{rhs}->{lhs}", f"{lhs},{result}->{rhs}"


def error_float8(equation, x, y, unit_x, unit_y):
    """Bound the error of a product of two arrays by their rounding."""
    x = abs(x)
    y = abs(y)
    # Each array has its own scale, up to twice what its largest value needs.
    bound_x = x * (1 + unit_x) + 2 * x.max() * FLOAT8_FLOOR
    bound_y = y * (1 + unit_y) + 2 * y.max() * FLOAT8_FLOOR
    return np.einsum(equation, bound_x, bound_y) - np.einsum(equation, x, y)


def error_int8(equation, x, y, unit_x, unit_y):
    operands, result = equation.split("->")
    bounds = []
    for dims, array, unit in zip(
        operands.split(","), (x, y), (unit_x, unit_y), strict=True
    ):
        summed_dims = tuple(i for i, dim in enumerate(dims) if dim not in result)
        bounds.append(abs(array) + unit * abs(array).max(summed_dims, keepdims=True))
    return np.einsum(equation, *bounds) - np.einsum(equation, abs(x), abs(y))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    spec=st.sampled_from(list(SPECS)),
    seed=st.integers(0, 2**16),
    exponents=st.tuples(*[st.floats(-6, 4)] * 3),
    kind=st.sampled_from(["normal", "zeros", "sparse", "huge"]),
    which=st.integers(0, 2),
    random=st.booleans(),
)
def test_products_and_gradients_err_by_the_rounding_of_their_operands(
    spec, seed, exponents, kind, which, random
):
    rng = np.random.default_rng(seed)
    shapes = [*SPECS[spec], np.einsum(spec, *map(np.zeros, SPECS[spec])).shape]
    arrays = [
        10**exponent * rng.normal(size=shape)
        for shape, exponent in zip(shapes, exponents, strict=True)
    ]
    if kind == "zeros":
        arrays[which][:] = 0
    if kind == "sparse":
        arrays[which][rng.random(shapes[which]) < 0.7] = 0
    if kind == "huge":
        arrays[which].flat[0] *= 1e6
    a, b, dy = (np.float32(array) for array in arrays)
    pairs = (a, b), (dy, b), (a, dy)
    exact_pairs = [[np.float64(x) for x in pair] for pair in pairs]

    actual = jitted(spec, a, b, dy, "float8")
    units = (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)
    for result, equation, (x, y), (unit_x, unit_y) in zip(
        actual, equations(spec), exact_pairs, units, strict=True
    ):
        error = abs(np.float64(result) - np.einsum(equation, x, y))
        assert (error <= 1.001 * error_float8(equation, x, y, unit_x, unit_y)).all()

    actual = jitted(spec, a, b, dy, "int8", keys(2, seed) if random else None)
    cotangent = 2 * INT8 if random else INT8
    bounds = (INT8, INT8), (cotangent, INT8), (0, 0)
    for result, equation, (x, y), (unit_x, unit_y) in zip(
        actual, equations(spec), exact_pairs, bounds, strict=True
    ):
        error = abs(np.float64(result) - np.einsum(equation, x, y))
        terms = np.einsum(equation, abs(x), abs(y))
        limit = 1.001 * error_int8(equation, x, y, unit_x, unit_y) + 1e-6 * terms
        assert (error <= limit).all()


@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_value_that_is_not_finite_shows_in_the_results(dtype, bad, which):
    """A step skips an update only if it sees that a value is not finite."""
    spec = "btd,df->btf"
    arrays = [np.ones(shape, np.float32) for shape in (*SPECS[spec], (2, 5, 6))]
    arrays[which][0, 0] = bad
    y, da, db = jitted(spec, *arrays, dtype)
    affected = [(y, da), (y, da), (da, db)][which]
    affected = (y, db) if which == 0 else affected
    assert all(not np.isfinite(x).all() for x in affected)


def test_no_scale_is_zero_or_infinite():
    for largest in (0.0, 1e-45, 1e-38, 1.0, 448.0, 3.4e38):
        x = jnp.full((1, 3), largest, jnp.float32)
        for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
            values, scale = to_float8(x, dtype, float8_scale(x, dtype))
            assert 0 < scale < np.inf
            assert np.isfinite(np.float32(values)).all()
        values, scale = to_int8(x, [1])
        assert (scale > 0).all()
        assert (scale < np.inf).all()


def test_float8_uses_its_range_and_scales_by_powers_of_two():
    for largest in (448.0, 449.0, 3e-3, 17.0):
        scale = float8_scale(jnp.asarray([largest, 0.0]), jnp.float8_e4m3fn)
        assert np.frexp(np.float32(scale))[0] == 0.5
        assert 224 < largest / scale <= 448


def test_random_rounding_adds_no_bias_and_follows_its_keys():
    x = jnp.full((80, 5, 50), 0.3).at[..., 0].set(127.0)  # The scale is 1.
    nearest, _ = to_int8(x, [2])
    assert not nearest[..., 1:].any()
    first, second = (to_int8(x, [2], keys_BT=keys(80, step))[0] for step in (0, 1))
    assert {*np.unique(first)} == {0, 1, 127}
    assert np.mean(first[..., 1:]) == pytest.approx(0.3, abs=0.02)
    for position in (first[1, 0], first[0, 1], second[0, 0]):
        assert (first[0, 0] != position).any(), "positions must not be rounded alike"
    repeated, _ = to_int8(x[40:, 2:], [2], keys_BT=keys(80)[40:, 2:])
    np.testing.assert_array_equal(repeated, first[40:, 2:])


@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("gather_again", [False, True])
def test_a_sharded_weight_gives_the_results_of_the_whole_weight(dtype, gather_again):
    """The shards travel in eight bits, with the scales of the whole weight."""
    spec = "btd,df->btf"
    rng = np.random.default_rng(0)
    a, b, dy = (
        np.float32(rng.normal(size=shape)) for shape in ((8, 5, 8), (8, 6), (8, 5, 6))
    )
    b[5] *= 100  # One device holds this row.
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placement = WeightPlacement(((0, ("fsdp",)),), gather_again=gather_again)
    weight_rows = PartitionSpec("fsdp")
    rows = PartitionSpec("fsdp")
    sharded = jax.jit(
        jax.shard_map(
            lambda a, b, dy, keys_BT: run(spec, a, b, dy, dtype, keys_BT, placement),
            mesh=mesh,
            in_specs=(rows, weight_rows, rows, rows),
            out_specs=(rows, rows, weight_rows),
            check_vma=False,
        )
    )
    text = sharded.lower(a, b, dy, keys(8)).as_text()
    actual = sharded(a, b, dy, keys(8))
    element = "f8E4M3FN" if dtype == "float8" else "i8"
    assert f"tensor<8x6x{element}>" in text
    assert "all_gather" in text
    assert not any(
        "all_gather" in line and "8x6xf32" in line for line in text.splitlines()
    )
    expected = jitted(spec, a, b, dy, dtype, keys(8))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_a_weight_gathered_in_float8_is_rounded_once():
    shard = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placement = WeightPlacement(((0, ("fsdp",)),))
    gathered = jax.jit(
        jax.shard_map(
            lambda shard: gather_weight(
                shard, placement, jnp.float32, make_quantization("float8")
            ),
            mesh=mesh,
            in_specs=PartitionSpec("fsdp"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(shard)
    scale = float8_scale(shard, jnp.float8_e4m3fn)
    assert (gathered != shard).any()
    for x in (shard, gathered):
        values, _ = to_float8(x, jnp.float8_e4m3fn, float8_scale(x, jnp.float8_e4m3fn))
        np.testing.assert_array_equal(np.float32(values) * scale, gathered)
