"""Rows travel to other devices, and come back in order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from model.parts.experts.rows import Route, cut_into_pieces, travel

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


def test_pieces_have_equal_sizes_and_leave_no_choice_out():
    """Of eight choices, two have no row; three, one and two have devices 0, 1 and 2."""
    device_nk = jnp.asarray([[0, 3], [2, 0], [1, 0], [3, 2]])
    order = jnp.argsort(device_nk.reshape(-1))
    row_nk = jnp.argsort(order).reshape(4, 2)
    sizes = jnp.asarray([3, 1, 2])
    choices, rows, is_used = cut_into_pieces(order, row_nk, device_nk, sizes, 4)
    expected = [[0, 3, 5, -1], [4, -1, -1, -1], [2, 7, -1, -1]]
    np.testing.assert_array_equal(
        jnp.where(is_used[:, 0], choices, -1).reshape(3, 4), expected
    )
    np.testing.assert_array_equal(rows, [[0, 12], [8, 1], [4, 2], [12, 9]])
