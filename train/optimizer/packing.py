"""Which device orthogonalizes which of Muon's matrices, and when.

Devices take whole matrices in rounds, one each: what a round costs is the work of its
largest. So matrices of one size fill as many rounds as they can, and where some are
left the next smaller ones fill that round up, padded with zeros to its size (zero rows
and columns stay zero and change nothing else). Where there are more devices than
matrices some rest.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_AT_ONCE = 2**26  # entries that a device orthogonalizes as one batch
_WORTH = 0.9  # of the work may be left, at most, where more devices share it


class Matrices(NamedTuple):
    """The matrices of a parameter, of which a device has the same part each."""

    count: int
    rows: int
    columns: int

    def work(self, ways: tuple[int, int] = (1, 1)) -> int:
        """Return the multiplications of a Newton-Schulz step on one whole matrix.

        Args:
            ways: in how many parts rows and columns are cut.
        """
        rows, columns = self.rows * ways[0], self.columns * ways[1]
        short, long = min(rows, columns), max(rows, columns)
        return 2 * short**2 * long + short**3


class Run(NamedTuple):
    """Matrices `start` to `stop` of a parameter."""

    parameter: int
    start: int
    stop: int


class Rounds(NamedTuple):
    """Rounds in which every device takes a batch of matrices of one size.

    rows, columns: of the part of a matrix, padding included.
    number: of rounds.
    batch: matrices that a device takes in a round.
    runs: the matrices in the order in which they are dealt.
    """

    rows: int
    columns: int
    number: int
    batch: int
    runs: tuple[Run, ...]


def pack(
    parameters: Sequence[Matrices], ways: tuple[int, int], devices: int
) -> list[Rounds]:
    """Deal all matrices to devices.

    Args:
        parameters: what a device has of each.
        ways: in how many parts rows and columns are cut.
        devices: that take matrices.
    """
    order = sorted(
        range(len(parameters)), key=lambda i: parameters[i].work(ways), reverse=True
    )
    remaining = {i: Run(i, 0, parameters[i].count) for i in order}
    rounds = []
    while remaining:
        largest = parameters[next(iter(remaining))]
        rows, columns = largest.rows, largest.columns
        equal = sum(
            run.stop - run.start
            for i, run in remaining.items()
            if parameters[i][1:] == largest[1:]
        )
        number = max(1, equal // devices)
        runs, free = list[Run](), number * devices
        for i, run in list(remaining.items()):
            if parameters[i].rows > rows or parameters[i].columns > columns:
                continue
            stop = min(run.stop, run.start + free)
            free -= stop - run.start
            runs += [Run(i, run.start, stop)] if stop > run.start else []
            remaining[i] = Run(i, stop, run.stop)
            if stop == run.stop:
                del remaining[i]
        entries = rows * columns * math.prod(ways)
        batch = max(
            n
            for n in range(1, number + 1)
            if number % n == 0 and (n == 1 or n * entries <= _AT_ONCE)
        )
        rounds.append(Rounds(rows, columns, number // batch, batch, tuple(runs)))
    return rounds


def deal(
    parameters: Sequence[Matrices], ways: tuple[int, int], copies: Mapping[str, int]
) -> tuple[tuple[str, ...], list[Rounds]]:
    """Deal all matrices to the devices that have parts of them, and to some copies.

    Args:
        parameters: what a device has of each.
        ways: in how many parts rows and columns are cut.
        copies: mesh axes, and their sizes, along which devices have the same parts.

    Returns:
        Those of these axes that leave the busiest device less to do, and the rounds.
    """
    axes, devices = (), math.prod(ways)
    rounds = pack(parameters, ways, devices)
    for axis, size in copies.items():
        more = pack(parameters, ways, devices * size)
        if _work(more, ways) < _WORTH * _work(rounds, ways):
            axes, devices, rounds = (*axes, axis), devices * size, more
    return axes, rounds


def _work(rounds: Sequence[Rounds], ways: tuple[int, int]) -> int:
    """Return the multiplications of a Newton-Schulz step on the busiest device."""
    return sum(
        r.number * r.batch * Matrices(1, r.rows, r.columns).work(ways) for r in rounds
    )
