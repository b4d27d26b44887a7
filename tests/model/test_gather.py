"""A weight brought together from its parts, and its gradient scattered back."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from model.gather import (
    AxisSteps,
    WeightPlacement,
    padding_multiple,
    scatter_groups,
)

SHAPE = (16, 3, 24)


@pytest.fixture
def run():
    """Run a function of a device's part on eight of them."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def run(function, x, spec, result):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=result, check_vma=False
        )
        return jax.jit(mapped)(x)

    return run


def numbers(*shape):
    """Whole numbers, whose sums are exact in any order."""
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) % 13


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"platform": "gpu"},
        {"platform": "tpu"},
        {"platform": "tpu", "axis_steps": (AxisSteps("fsdp", (4,), (2, 2), (2, 2)),)},
        {
            "platform": "tpu",
            "axis_steps": (AxisSteps("fsdp", (2, 2), (4,), (2, 1, 2)),),
        },
        {"platform": "tpu", "is_stack": True},
        {
            "platform": "tpu",
            "is_stack": True,
            "axis_steps": (AxisSteps("fsdp", (2, 2), (4,), (2, 2)),),
        },
    ],
)
@pytest.mark.parametrize(("dim", "axes"), [(0, ("data", "fsdp")), (2, ("fsdp",))])
def test_parts_make_the_whole_and_gradients_add_up_to_parts(run, dim, axes, options):
    rest = tuple(axis for axis in ("data", "fsdp") if axis not in axes)
    placement = WeightPlacement(((dim, axes),), rest, **options)
    spec = [None] * len(SHAPE)
    spec[dim] = axes
    whole = numbers(*SHAPE)
    found = run(placement.gather, whole, PartitionSpec(*spec), PartitionSpec())
    np.testing.assert_array_equal(found, whole)
    each = numbers(8, *SHAPE)  # a gradient on each of eight devices
    rows = PartitionSpec(("data", "fsdp"))
    found = run(
        lambda x: placement.reduce_scatter(x[0]), each, rows, PartitionSpec(*spec)
    )
    np.testing.assert_array_equal(found, each.sum(0))


@pytest.mark.parametrize(("columns", "pinned"), [(24, False), (128, True)])
@pytest.mark.parametrize("automatic", [False, True])
def test_a_tpu_rounds_each_layers_part_by_itself(run, columns, pinned, automatic):
    """As integers, which XLA does not round for all layers at once."""
    placement = WeightPlacement(
        ((0, ("fsdp",)),), platform="tpu", has_automatic_axes=automatic
    )
    whole = numbers(16, columns) + 2**-12
    shard = PartitionSpec("fsdp")
    everywhere = PartitionSpec()
    found = run(
        lambda x: placement.gather_as(x, jnp.bfloat16), whole, shard, everywhere
    )
    np.testing.assert_array_equal(found, whole.astype(jnp.bfloat16))
    text = str(
        jax.make_jaxpr(
            lambda x: placement.gather_as(x, jnp.bfloat16), axis_env=[("fsdp", 4)]
        )(whole[:4])
    )
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert len(barriers) == 1
    assert "u32" in barriers[0]
    assert ("layout_constraint" in text) == (pinned and not automatic)


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", True)])
def test_a_gradient_travels_in_the_reduce_dtype(run, dtype, rounds):
    placement = WeightPlacement(((0, ("fsdp",)),), reduce_dtype=jnp.dtype(dtype))
    gradient = jnp.full((4, 2), 1 + 2**-12)
    place = PartitionSpec("fsdp")
    found = run(placement.reduce_scatter, gradient, PartitionSpec(), place)
    assert found.dtype == jnp.float32
    assert (found[0, 0] == 4) == rounds


@pytest.mark.parametrize(
    ("sizes", "slices"),
    [
        ((3, 4), 1),
        ((16, 4), 1),
        ((8, 25), 1),
        ((4, 2), 2),
        ((13, 2), 2),
        ((16, 16, 4), 4),
    ],
)
def test_planes_then_lines_then_slices_give_each_its_part(sizes, slices):
    size = math.prod(sizes)
    holds = {device: set(range(size)) for device in range(size)}
    steps = scatter_groups(sizes)
    assert len(steps) == len(sizes)
    for number, groups in enumerate(steps, 1):
        assert groups is not None
        for group in groups:  # the last step alone crosses slices
            crossed = len({device % slices for device in group})
            assert crossed == (slices if number == len(steps) else 1)
        assert sorted(itertools.chain(*groups)) == list(range(size))
        for group in groups:
            for place, device in enumerate(group):
                own = sorted(holds[device])
                share = len(own) // len(group)
                holds[device] = {*own[place * share : (place + 1) * share]}
    assert holds == {device: {device} for device in range(size)}


@pytest.mark.parametrize("size", [64, 4096, 8192, 14336, 50304, 128256])
def test_what_is_scattered_can_be_cut_in_two_until_it_is_small(size):
    tiles = -(-size // padding_multiple(size)) * padding_multiple(size) / 128
    while tiles > 90:
        tiles /= 2
        assert tiles == int(tiles)
    assert -size % padding_multiple(size) <= size / 50
