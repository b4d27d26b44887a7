"""The shapes of batches over a run: how many rows they have, and how long these are.

`data.batch_schedule` and `data.sequence_schedule` divide the batches of a run into
phases of one shape. The rows of the data always have `data.sequence_length` tokens. In
a phase with shorter rows, each row of the data is cut into equal parts, and a batch
consists of consecutive parts. Therefore a batch is still a function of the config, the
seed and its number.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from data.config import BatchChange, DataConfig, LengthChange


class Phase(NamedTuple):
    """Consecutive batches of one shape.

    first_batch: the number of the first batch.
    rows, length: the shape of a batch.
    first_part: the index of the first batch's first part, if all rows of the data are
        cut into parts of `length`.
    first_token: the number of tokens in all earlier batches.
    """

    first_batch: int
    rows: int
    length: int
    first_part: int = 0
    first_token: int = 0

    @property
    def tokens_per_batch(self) -> int:
        """The number of tokens in a batch."""
        return self.rows * self.length

    def part(self, batch: int) -> int:
        """Return the index of a batch's first part."""
        return self.first_part + (batch - self.first_batch) * self.rows

    def token(self, batch: int) -> int:
        """Return the number of tokens in all batches before this one."""
        return self.first_token + (batch - self.first_batch) * self.tokens_per_batch

    def end(self, change: BatchChange | LengthChange) -> int:
        """Return the first batch after this phase, if a change ends it."""
        if change.from_step is not None:
            return max(self.first_batch, change.from_step)
        tokens = max(0.0, (change.from_tokens or 0.0) - self.first_token)
        return self.first_batch + int(-(-tokens // self.tokens_per_batch))


def phases_of(config: DataConfig) -> tuple[Phase, ...]:
    """Return the phases of a run in order. The last one has no end."""
    phases = [Phase(0, config.batch_size, config.sequence_length)]
    batch_changes = list(config.batch_schedule)
    length_changes = list(config.sequence_schedule)
    while batch_changes or length_changes:
        last = phases[-1]
        end = min(last.end(c) for c in [*batch_changes[:1], *length_changes[:1]])
        rows = last.rows
        length = last.length
        if batch_changes and last.end(batch_changes[0]) == end:
            rows = batch_changes.pop(0).rows
        if length_changes and last.end(length_changes[0]) == end:
            length = length_changes.pop(0).length
        # If batches have read some of a longer part, its remainder is skipped.
        part = -(-last.part(end) * last.length // length)
        if end == last.first_batch:
            phases.pop()  # It has no batch.
        phases.append(Phase(end, rows, length, part, last.token(end)))
    return tuple(phases)


def phase_at(phases: Sequence[Phase], batch: int) -> Phase:
    """Return the phase of a batch."""
    return phases[bisect_right(phases, batch, key=lambda p: p.first_batch) - 1]


def step_at(config: DataConfig, tokens: float) -> int:
    """Return the first step before which the batches have at least `tokens` tokens.

    Batches that `skip_batches` leaves out count, so that skipping some moves no step.
    """
    phases = phases_of(config)
    index = bisect_right(phases, tokens, key=lambda phase: phase.first_token) - 1
    return phases[index].end(BatchChange(from_tokens=tokens))


def batch_number(step: int, skip_batches: Sequence[int]) -> int:
    """Return the number of the batch that a step trains on, given `skip_batches`."""
    return step + sum(map(len, _skipped(step, skip_batches)))


def tokens_before(config: DataConfig, step: int) -> int:
    """Return the number of tokens in the batches of the first `step` steps."""
    phases = phases_of(config)
    skipped = _skipped(step, config.skip_batches)

    def tokens(batch: int) -> int:
        return phase_at(phases, batch).token(batch)

    total = tokens(batch_number(step, config.skip_batches))
    return total - sum(tokens(s.stop) - tokens(s.start) for s in skipped)


def _skipped(step: int, skip_batches: Sequence[int]) -> list[range]:
    """Return the ranges of batches that are skipped before the batch of a step."""
    skipped = list[range]()
    number = step
    next_batch = 0
    for first, last in zip(skip_batches[::2], skip_batches[1::2], strict=True):
        batches = range(max(first, next_batch), last + 1)
        if number >= batches.start:
            skipped.append(batches)
            number += len(batches)
        next_batch = last + 1
    return skipped
