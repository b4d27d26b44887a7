"""The right rows on the right devices."""

from itertools import repeat

import numpy as np
import pytest
from jax.sharding import NamedSharding

from data.batch import Batch
from tests.train.conftest import CUBE
from train.core.feed import Feed, local_rows, place


@pytest.fixture(params=[CUBE, ("mesh.fsdp=8",)], ids=" ".join)
def program(request, programs):
    return programs(*request.param, devices=8)


def batch_of(rows: int = 8) -> Batch:
    """Every element tells its row and column."""
    x = np.arange(rows * 32, dtype=np.int32).reshape(rows, 32)
    return Batch(x, x + 1, x + 2, x + 3)


def check(placed: Batch, whole: Batch, program) -> None:
    mesh = program.mesh
    for field, expected in zip(placed, whole, strict=True):
        assert field.sharding == program.batch.inputs.sharding
        for shard in field.addressable_shards:
            found = np.argwhere(mesh.devices == shard.device)[0]
            at = dict(zip(mesh.axis_names, found, strict=True))
            parts = mesh.shape["data"] * mesh.shape["fsdp"]
            part = at["data"] * mesh.shape["fsdp"] + at["fsdp"]
            size = len(expected) // parts
            rows = expected[part * size : (part + 1) * size]
            np.testing.assert_array_equal(shard.data, rows)


def test_each_device_gets_its_rows(program):
    check(place(batch_of(), program.batch), batch_of(), program)


def test_local_rows_are_all_rows_each_once(program):
    rows = local_rows(program.batch)
    assert len(rows) == len({(r.start, r.stop) for r in rows})
    read = np.concatenate([np.arange(8)[r] for r in rows])
    assert read.tolist() == list(range(8))


def test_a_process_that_holds_a_part_places_that_part(program, monkeypatch):
    """As with several processes: the rows come end to end, and are found again."""
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    check(place(batch_of(), program.batch), batch_of(), program)


def test_a_batch_is_handed_over_before_the_next_is_waited_for(programs):
    """A source that stalls, or ends with an error, costs no step before it."""
    program = programs("mesh.fsdp=8", devices=8)

    def batches():
        yield batch_of()
        raise TimeoutError

    feed = Feed(batches(), repeat(program.batch))
    check(next(feed), batch_of(), program)
    with pytest.raises(TimeoutError):
        next(feed)
