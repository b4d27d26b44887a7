"""Batches from the host to the devices, each process reading just its rows."""

import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from data.batches import Batch


def local_rows(like: Batch) -> list[slice]:
    """Return the slices of a global batch's rows that this process' devices hold."""
    rows = like.inputs
    indices = rows.sharding.addressable_devices_indices_map(rows.shape).values()
    spans = {index[0].indices(rows.shape[0])[:2] for index in indices}
    return [slice(*span) for span in sorted(spans)]


def place(batch: Batch, like: Batch) -> Batch:
    """Put this process' rows of a global batch on its devices.

    Args:
        batch: int32 [local rows, T] fields, the rows of `local_rows` end to end.
        like: `jax.ShapeDtypeStruct` fields [B, T] with their sharding; a field that is
            None is left out.
    """
    starts, num_rows = {}, 0
    for rows in local_rows(like):
        starts[rows.start] = num_rows
        num_rows += rows.stop - rows.start

    def array(shape: jax.ShapeDtypeStruct | None, field: np.ndarray):
        if shape is None or shape.sharding.is_fully_addressable:
            return None if shape is None else jax.device_put(field, shape.sharding)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(shape.shape[0])
            return field[starts[start] : starts[start] + stop - start, index[1]]

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    return Batch(*map(array, like, batch))


class Feed:
    """Device batches in their order.

    A step is dispatched, not awaited, so the transfer of the batch after it overlaps
    the computation. No batch waits for the one after it: a source that stalls costs no
    step that could be taken.

    batches: the host's batches, which are read ahead (`data.prefetch`).
    like: `jax.ShapeDtypeStruct` fields with their sharding.
    phase: is told "data" before each wait for a batch, and "step" after it.
    seconds_waited: the time spent waiting for the host's batches.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        like: Batch,
        phase: Callable[[str], None] = lambda name: None,
    ):
        self._batches, self._like, self._phase = batches, like, phase
        self.seconds_waited = 0.0

    def __iter__(self) -> Iterator[Batch]:
        """Iterate to the end of the host's batches."""
        return self

    def __next__(self) -> Batch:
        """Wait for the host's next batch, and start its transfer."""
        start = time.perf_counter()
        self._phase("data")
        batch = next(self._batches)
        self._phase("step")
        self.seconds_waited += time.perf_counter() - start
        return place(batch, self._like)
