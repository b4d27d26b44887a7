"""Rows travel to other devices, and come back in order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from model.parts.experts.rows import Route, travel

S = 4
R = 12
ROOM = 48
COUNTS = np.random.default_rng(0).multinomial(R, [1 / S] * S, S)
ONE = np.zeros((S, S), int)
ONE[:, 2] = R  # All rows go to one device.


@pytest.fixture(scope="module")
def sent():
    """Return a function that sends rows to other devices and back.

    It maps rows [S R, 2] and counts [S, S] to (arrivals, returns).
    """
    mesh = Mesh(jax.devices()[:S], "expert")
    rows = PartitionSpec("expert")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, rows))
    def sent(x, counts):
        axes = ("expert",)
        route = Route.to_devices(jax.lax.all_gather(counts[0], axes), axes)
        arrivals, pull_back = jax.vjp(
            lambda x: travel(x, route, (R, ROOM), axes, True), x
        )
        (returns,) = pull_back(arrivals)
        return arrivals, returns

    return sent


@pytest.mark.parametrize("counts", [COUNTS, ONE, ONE[:, ::-1]], ids=["any", "one", "2"])
def test_rows_are_ordered_by_sender_and_return_in_order(sent, counts):
    """The rows return by the gradient of the way there."""
    x = np.arange(2.0 * S * R, dtype=np.float32).reshape(S, R, 2) + 1
    starts = np.cumsum(counts, axis=1) - counts
    arrivals, returns = jax.device_get(sent(x.reshape(-1, 2), jnp.asarray(counts)))
    for device, actual in enumerate(arrivals.reshape(S, ROOM, 2)):
        rows = [
            x[sender, starts[sender, device] :][: counts[sender, device]]
            for sender in range(S)
        ]
        expected = np.concatenate(rows)
        np.testing.assert_array_equal(actual[: len(expected)], expected)
        assert not actual[len(expected) :].any()
    np.testing.assert_array_equal(returns.reshape(x.shape), x)
