"""Products with operands of eight bits, against float64."""

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
# Half of a unit in the last place.
E4M3 = 2**-4
E5M2 = 2**-3
INT8 = 0.5 / 127
FLOAT8_FLOOR = 2**-10 / 448  # half of e4m3's smallest number, to its largest


def eight(dtype: str) -> Quantization:
    return RECIPES[ComputeDtype(dtype)](emulated=True)


def keys(rows: int, step: int = 0, length: int = 5):
    seeds = step * rows * length + jnp.arange(rows * length)
    return jax.vmap(jax.vmap(jax.random.key))(seeds.reshape(rows, length))


def run(spec, a, b, dy, dtype, keys_BT=None, placement=UNSHARDED):
    """Return (y, da, db)."""

    def multiply(a, b):
        return product(spec, a, b, jnp.float32, placement, eight(dtype), keys_BT)

    y, back = jax.vjp(multiply, a, b)
    return y, *back(dy)


jitted = jax.jit(run, static_argnums=(0, 4))


def equations(spec):
    left, right = spec.split("->")[0].split(",")
    result = spec.split("->")[1]
    return spec, f"{result},{right}->{left}", f"{left},{result}->{right}"


def error_float8(equation, x, y, unit_x, unit_y):
    """Bound the error of a product of two arrays by their rounding."""
    x = abs(x)
    y = abs(y)
    # Of two arrays with scales of their own, up to twice what the largest needs.
    wide_x = x * (1 + unit_x) + 2 * x.max() * FLOAT8_FLOOR
    wide_y = y * (1 + unit_y) + 2 * y.max() * FLOAT8_FLOOR
    return np.einsum(equation, wide_x, wide_y) - np.einsum(equation, x, y)


def error_int8(equation, x, y, unit_x, unit_y):
    operands, result = equation.split("->")
    wide = []
    for dims, array, unit in zip(
        operands.split(","), (x, y), (unit_x, unit_y), strict=True
    ):
        gone = tuple(i for i, dim in enumerate(dims) if dim not in result)
        wide.append(abs(array) + unit * abs(array).max(gone, keepdims=True))
    return np.einsum(equation, *wide) - np.einsum(equation, abs(x), abs(y))


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
    wide = [[np.float64(x) for x in pair] for pair in pairs]

    found = jitted(spec, a, b, dy, "float8")
    units = (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)
    for y, equation, pair, unit in zip(
        found, equations(spec), wide, units, strict=True
    ):
        error = abs(np.float64(y) - np.einsum(equation, *pair))
        assert (error <= 1.001 * error_float8(equation, *pair, *unit)).all()

    found = jitted(spec, a, b, dy, "int8", keys(2, seed) if random else None)
    cotangent = 2 * INT8 if random else INT8
    bounds = (INT8, INT8), (cotangent, INT8), (0, 0)
    for y, equation, pair, unit in zip(
        found, equations(spec), wide, bounds, strict=True
    ):
        error = abs(np.float64(y) - np.einsum(equation, *pair))
        terms = np.einsum(equation, *map(abs, pair))
        most = 1.001 * error_int8(equation, *pair, *unit) + 1e-6 * terms
        assert (error <= most).all()


@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_shows(dtype, bad, which):
    """The step must see that it has to leave an update out."""
    spec = "btd,df->btf"
    arrays = [np.ones(shape, np.float32) for shape in (*SPECS[spec], (2, 5, 6))]
    arrays[which][0, 0] = bad
    y, da, db = jitted(spec, *arrays, dtype)
    hit = [(y, da), (y, da), (da, db)][which]
    hit = (y, db) if which == 0 else hit
    assert all(not np.isfinite(x).all() for x in hit)


def test_no_scale_is_zero_or_infinite():
    for most in (0.0, 1e-45, 1e-38, 1.0, 448.0, 3.4e38):
        x = jnp.full((1, 3), most, jnp.float32)
        for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
            values, scale = to_float8(x, dtype, float8_scale(x, dtype))
            assert 0 < scale < np.inf
            assert np.isfinite(np.float32(values)).all()
        values, scale = to_int8(x, [1])
        assert (scale > 0).all()
        assert (scale < np.inf).all()


def test_float8_uses_its_range_and_scales_by_powers_of_two():
    for most in (448.0, 449.0, 3e-3, 17.0):
        scale = float8_scale(jnp.asarray([most, 0.0]), jnp.float8_e4m3fn)
        assert np.frexp(np.float32(scale))[0] == 0.5
        assert 224 < most / scale <= 448


def test_random_rounding_adds_no_bias_and_follows_its_keys():
    x = jnp.full((80, 5, 50), 0.3).at[..., 0].set(127.0)  # so that the scale is 1
    nearest, _ = to_int8(x, [2])
    assert not nearest[..., 1:].any()
    first, second = (to_int8(x, [2], keys_BT=keys(80, step))[0] for step in (0, 1))
    assert {*np.unique(first)} == {0, 1, 127}
    assert np.mean(first[..., 1:]) == pytest.approx(0.3, abs=0.02)
    for other in (first[1, 0], first[0, 1], second[0, 0]):
        assert (first[0, 0] != other).any(), "positions must not be rounded alike"
    again, _ = to_int8(x[40:, 2:], [2], keys_BT=keys(80)[40:, 2:])
    np.testing.assert_array_equal(again, first[40:, 2:])


@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("gather_again", [False, True])
def test_parts_of_a_weight_give_what_the_whole_gives(dtype, gather_again):
    """They travel in eight bits, with the scales of the whole."""
    spec = "btd,df->btf"
    rng = np.random.default_rng(0)
    a, b, dy = (
        np.float32(rng.normal(size=shape)) for shape in ((8, 5, 8), (8, 6), (8, 5, 6))
    )
    b[5] *= 100  # on one device
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placement = WeightPlacement(((0, ("fsdp",)),), gather_again=gather_again)
    cut = PartitionSpec("fsdp")
    rows = PartitionSpec("fsdp")
    apart = jax.jit(
        jax.shard_map(
            lambda a, b, dy, keys_BT: run(spec, a, b, dy, dtype, keys_BT, placement),
            mesh=mesh,
            in_specs=(rows, cut, rows, rows),
            out_specs=(rows, rows, cut),
            check_vma=False,
        )
    )
    text = apart.lower(a, b, dy, keys(8)).as_text()
    found = apart(a, b, dy, keys(8))
    element = "f8E4M3FN" if dtype == "float8" else "i8"
    assert f"tensor<8x6x{element}>" in text
    assert "all_gather" in text
    assert not any(
        "all_gather" in line and "8x6xf32" in line for line in text.splitlines()
    )
    whole = jitted(spec, a, b, dy, dtype, keys(8))
    for x, y in zip(found, whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_a_weight_gathered_in_float8_is_rounded_once():
    part = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placement = WeightPlacement(((0, ("fsdp",)),))
    whole = jax.jit(
        jax.shard_map(
            lambda part: gather_weight(part, placement, jnp.float32, eight("float8")),
            mesh=mesh,
            in_specs=PartitionSpec("fsdp"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(part)
    scale = float8_scale(part, jnp.float8_e4m3fn)
    assert (whole != part).any()
    for x in (part, whole):
        values, _ = to_float8(x, jnp.float8_e4m3fn, float8_scale(x, jnp.float8_e4m3fn))
        np.testing.assert_array_equal(np.float32(values) * scale, whole)
