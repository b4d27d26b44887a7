"""Each device gets its rows of the batch."""

from itertools import repeat

import numpy as np
import pytest
from jax.sharding import NamedSharding

from data.batch import Batch
from tests.train.conftest import CUBE
from train.core.feed import Feed, local_rows, place


@pytest.fixture(params=[CUBE, ("mesh.fsdp=8",)], ids=" ".join)
def program(request, programs):
    return programs(request.param, devices=8)


def batch_of(rows: int = 8) -> Batch:
    """Return a batch whose elements identify their rows and columns."""
    x = np.arange(rows * 32, dtype=np.int32).reshape(rows, 32)
    return Batch(x, x + 1, x + 2, x + 3)


def check(actual: Batch, batch: Batch, program) -> None:
    mesh = program.mesh
    for field, expected in zip(actual, batch, strict=True):
        assert field.sharding == program.batch.inputs.sharding
        for shard in field.addressable_shards:
            indices = np.argwhere(mesh.devices == shard.device)[0]
            coordinates = dict(zip(mesh.axis_names, indices, strict=True))
            parts = mesh.shape["data"] * mesh.shape["fsdp"]
            part = coordinates["data"] * mesh.shape["fsdp"] + coordinates["fsdp"]
            size = len(expected) // parts
            rows = expected[part * size : (part + 1) * size]
            np.testing.assert_array_equal(shard.data, rows)


def test_each_device_gets_its_rows(program):
    check(place(batch_of(), program.batch), batch_of(), program)


def test_local_rows_cover_each_row_once(program):
    rows = local_rows(program.batch)
    assert len(rows) == len({(r.start, r.stop) for r in rows})
    indices = np.concatenate([np.arange(8)[r] for r in rows])
    assert indices.tolist() == list(range(8))


def test_a_process_that_holds_a_part_places_that_part(program, monkeypatch):
    """The rows are concatenated, as with several processes, and found again."""
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    check(place(batch_of(), program.batch), batch_of(), program)


def test_a_batch_is_handed_over_before_the_next_is_waited_for(programs):
    """A source that stalls, or ends with an error, costs no step before it."""
    program = programs(["mesh.fsdp=8"], devices=8)

    def batches():
        yield batch_of()
        raise TimeoutError

    feed = Feed(batches(), repeat(program.batch))
    check(next(feed), batch_of(), program)
    with pytest.raises(TimeoutError):
        next(feed)
