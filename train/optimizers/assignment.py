"""Assign Muon's matrices to devices, in rounds.

In each round, every device takes a batch of whole matrices. The largest matrix
determines how long a round takes, so matrices of one size fill as many rounds as
possible. The remaining ones share a round with the next smaller matrices, padded with
zeros to the same size. Zero rows and columns stay zero in Muon's update and do not
change other entries. If there are more devices than matrices, some devices idle.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_MAX_BATCH_ENTRIES = 2**26  # entries that a device orthogonalizes as one batch
# Replicas share the work if that reduces each device's work below this fraction.
_WORTHWHILE_FRACTION = 0.9


class Matrices(NamedTuple):
    """The local parts [count, rows, columns] of a parameter's matrices."""

    count: int
    rows: int
    columns: int

    def work(self, num_shards: tuple[int, int] = (1, 1)) -> int:
        """Return the multiplications of a Newton-Schulz step on one whole matrix.

        `num_shards` are the numbers of shards of the rows and of the columns.
        """
        rows = self.rows * num_shards[0]
        columns = self.columns * num_shards[1]
        short = min(rows, columns)
        long = max(rows, columns)
        return 2 * short**2 * long + short**3


class MatrixSpan(NamedTuple):
    """Matrices `start` to `stop` - 1 of the parameter with the index `parameter`."""

    parameter: int
    start: int
    stop: int


class Rounds(NamedTuple):
    """Rounds in which each device takes a batch of matrices of one size.

    rows, columns: the size of a local part, padding included.
    count: the number of rounds.
    batch: the number of matrices that a device takes in a round.
    spans: the matrices, in the order of their assignment.
    """

    rows: int
    columns: int
    count: int
    batch: int
    spans: tuple[MatrixSpan, ...]


def assign(
    parameters: Sequence[Matrices],
    num_shards: tuple[int, int],
    replica_sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], list[Rounds]]:
    """Assign all matrices to the devices that hold parts of them, and to replicas.

    `replica_sizes` are the sizes of the mesh axes along which parts are replicated.
    Returns the work axes (the replica axes along which sharing the work saves time),
    and the rounds.
    """
    work_axes = ()
    num_devices = math.prod(num_shards)
    rounds = _fill_rounds(parameters, num_shards, num_devices)
    for axis, size in replica_sizes.items():
        shared_rounds = _fill_rounds(parameters, num_shards, num_devices * size)
        max_work = _WORTHWHILE_FRACTION * _count_work(rounds, num_shards)
        if _count_work(shared_rounds, num_shards) < max_work:
            work_axes = (*work_axes, axis)
            rounds = shared_rounds
            num_devices *= size
    return work_axes, rounds


def _fill_rounds(
    parameters: Sequence[Matrices], num_shards: tuple[int, int], num_devices: int
) -> list[Rounds]:
    work = [matrices.work(num_shards) for matrices in parameters]
    order = sorted(range(len(parameters)), key=lambda i: -work[i])
    remaining = {i: MatrixSpan(i, 0, parameters[i].count) for i in order}
    rounds = []
    while remaining:
        largest = parameters[next(iter(remaining))]
        rows = largest.rows
        columns = largest.columns
        num_equal = sum(
            span.stop - span.start
            for i, span in remaining.items()
            if parameters[i][1:] == largest[1:]
        )
        num_rounds = max(1, num_equal // num_devices)
        spans = list[MatrixSpan]()
        free_slots = num_rounds * num_devices
        for i, span in list(remaining.items()):
            if parameters[i].rows > rows or parameters[i].columns > columns:
                continue
            stop = min(span.stop, span.start + free_slots)
            free_slots -= stop - span.start
            spans += [MatrixSpan(i, span.start, stop)] if stop > span.start else []
            remaining[i] = MatrixSpan(i, stop, span.stop)
            if stop == span.stop:
                del remaining[i]
        entries = rows * columns * math.prod(num_shards)
        divisors = [n for n in range(1, num_rounds + 1) if num_rounds % n == 0]
        batch = max(n for n in divisors if n == 1 or n * entries <= _MAX_BATCH_ENTRIES)
        rounds.append(Rounds(rows, columns, num_rounds // batch, batch, tuple(spans)))
    return rounds


def _count_work(rounds: Sequence[Rounds], num_shards: tuple[int, int]) -> int:
    """Return the multiplications of a Newton-Schulz step on the busiest device."""
    return sum(
        r.count * r.batch * Matrices(1, r.rows, r.columns).work(num_shards)
        for r in rounds
    )
