"""A weight is gathered from its shards, and its gradient is reduced and scattered."""

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
    """Return a function that runs a per-device function on eight devices."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def run(function, x, spec, out_spec):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=out_spec, check_vma=False
        )
        return jax.jit(mapped)(x)

    return run


def numbers(shape):
    """Return whole numbers, whose sums are exact in any order."""
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
def test_weights_are_gathered_and_gradients_are_scattered(run, dim, axes, options):
    replica_axes = tuple(axis for axis in ("data", "fsdp") if axis not in axes)
    placement = WeightPlacement(((dim, axes),), replica_axes, **options)
    spec = [None] * len(SHAPE)
    spec[dim] = axes
    weight = numbers(SHAPE)
    actual = run(placement.gather, weight, PartitionSpec(*spec), PartitionSpec())
    np.testing.assert_array_equal(actual, weight)
    gradients = numbers((8, *SHAPE))  # Each of eight devices has one.
    rows = PartitionSpec(("data", "fsdp"))
    actual = run(
        lambda x: placement.reduce_scatter(x[0]), gradients, rows, PartitionSpec(*spec)
    )
    np.testing.assert_array_equal(actual, gradients.sum(0))


@pytest.mark.parametrize(("columns", "pinned"), [(24, False), (128, True)])
@pytest.mark.parametrize("automatic", [False, True])
def test_a_tpu_rounds_each_layers_shard_separately(run, columns, pinned, automatic):
    """Shards pass as integers, which XLA does not round for all layers at once."""
    placement = WeightPlacement(
        ((0, ("fsdp",)),), platform="tpu", has_automatic_axes=automatic
    )
    weight = numbers((16, columns)) + 2**-12
    shard = PartitionSpec("fsdp")
    everywhere = PartitionSpec()
    actual = run(
        lambda x: placement.gather_as(x, jnp.bfloat16), weight, shard, everywhere
    )
    np.testing.assert_array_equal(actual, weight.astype(jnp.bfloat16))
    text = str(
        jax.make_jaxpr(
            lambda x: placement.gather_as(x, jnp.bfloat16), axis_env=[("fsdp", 4)]
        )(weight[:4])
    )
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert len(barriers) == 1
    assert "u32" in barriers[0]
    assert ("layout_constraint" in text) == (pinned and not automatic)


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", True)])
def test_a_gradient_travels_in_the_reduce_dtype(run, dtype, rounds):
    placement = WeightPlacement(((0, ("fsdp",)),), reduce_dtype=jnp.dtype(dtype))
    gradient = jnp.full((4, 2), 1 + 2**-12)
    shard = PartitionSpec("fsdp")
    actual = run(placement.reduce_scatter, gradient, PartitionSpec(), shard)
    assert actual.dtype == jnp.float32
    assert (actual[0, 0] == 4) == rounds


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
def test_scatter_groups_give_each_device_its_part(sizes, slices):
    size = math.prod(sizes)
    holds = {device: set(range(size)) for device in range(size)}
    steps = scatter_groups(sizes)
    assert len(steps) == len(sizes)
    for number, groups in enumerate(steps, 1):
        assert groups is not None
        for group in groups:  # Only the last step crosses slices.
            crossed = len({device % slices for device in group})
            assert crossed == (slices if number == len(steps) else 1)
        assert sorted(itertools.chain(*groups)) == list(range(size))
        for group in groups:
            for offset, device in enumerate(group):
                elements = sorted(holds[device])
                share = len(elements) // len(group)
                holds[device] = {*elements[offset * share : (offset + 1) * share]}
    assert holds == {device: {device} for device in range(size)}


@pytest.mark.parametrize("size", [64, 4096, 8192, 14336, 50304, 128256])
def test_a_padded_dim_can_be_halved_until_it_is_small(size):
    tiles = -(-size // padding_multiple(size)) * padding_multiple(size) / 128
    while tiles > 90:
        tiles /= 2
        assert tiles == int(tiles)
    assert -size % padding_multiple(size) <= size / 50
