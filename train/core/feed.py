"""Transfer batches from the host to the devices; each process reads only its rows."""

import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from data.batch import Batch


def local_rows(like: Batch) -> list[slice]:
    """Return the slices of a global batch's rows that this process' devices hold."""
    rows = like.inputs
    indices = rows.sharding.addressable_devices_indices_map(rows.shape).values()
    spans = {index[0].indices(rows.shape[0])[:2] for index in indices}
    return [slice(*span) for span in sorted(spans)]


def place(batch: Batch, like: Batch) -> Batch:
    """Put this process' rows of a global batch on its devices.

    Args:
        batch: int32 [local rows, T] fields, the concatenated rows of `local_rows`.
        like: `jax.ShapeDtypeStruct` fields [B, T] with their sharding; a field that is
            None is left out.
    """
    local_starts = {}
    num_rows = 0
    for rows in local_rows(like):
        local_starts[rows.start] = num_rows
        num_rows += rows.stop - rows.start

    def place_field(struct: jax.ShapeDtypeStruct | None, field: np.ndarray):
        if struct is None or struct.sharding.is_fully_addressable:
            return None if struct is None else jax.device_put(field, struct.sharding)

        def local_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(struct.shape[0])
            local_start = local_starts[start]
            return field[local_start : local_start + stop - start, index[1]]

        return jax.make_array_from_callback(struct.shape, struct.sharding, local_shard)

    return Batch(*map(place_field, like, batch))


class Feed:
    """An iterator over device batches.

    Steps are dispatched but not awaited, so the transfer of a batch overlaps the
    previous step. Each call takes only one batch from the host, so that a stalled
    source does not delay a step whose batch has arrived.

    batches: the host's batches, which are read ahead (`data.prefetch`).
    likes: `jax.ShapeDtypeStruct` fields with their sharding, for each batch.
    phase: is called with "data" before each wait for a batch, and "step" after it.
    seconds_waited: the time spent waiting for the host's batches.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        likes: Iterator[Batch],
        phase: Callable[[str], None] = lambda name: None,
    ):
        self._batches = batches
        self._likes = likes
        self._phase = phase
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
        return place(batch, next(self._likes))
