"""Compare contenders on one GPU, of which each may need all of the memory.

Therefore only one contender's process runs at a time. `tune` finds the batch size with
which a contender processes most tokens per second. `in_turns` then runs the contenders
alternately, each time in a new process.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.contenders import Contender, EndedEarly, print_rows, rows_of, setting
from benchmarks.step_worker import Spec
from train.hardware.chips import peak_flops

BATCH_SIZES = {  # `tune` tries these in order until memory is exhausted or speed falls.
    "nano": (12, 24),
    "gpt2_124m": (16, 32, 64, 128),
    "gpt2_1558m": (4, 8, 16, 32),
}
BLOCKS = 3  # blocks in a process
STEPS = 20  # steps in a block
TURNS = 3  # processes


def require(holds: bool, otherwise: str) -> None:
    """Raise SystemExit with the message `otherwise` if a condition does not hold."""
    if not holds:
        raise SystemExit(otherwise)


@contextmanager
def running(spec: Spec) -> Iterator[Contender]:
    """Start a contender and take its first step; end its process after the `with`."""
    worker = Contender(spec)
    try:
        worker.ask("warm")
        yield worker
    finally:
        worker.quit()


def tokens_per_s(spec: Spec) -> float:
    """Return the tokens per second of a contender that runs alone."""
    with running(spec) as worker:
        for _ in range(BLOCKS):
            worker.run(STEPS)
    return spec.shape.tokens / statistics.median(worker.blocks)


def tune(spec: Spec) -> dict[int, float]:
    """Return the tokens per second by batch size, from the smallest size on.

    The search ends after the first size that is slower than a smaller one, or before
    the first size that does not fit.

    Raises:
        SystemExit: if no batch size fits.
    """
    speeds: dict[int, float] = {}
    for batch_size in BATCH_SIZES[spec.preset]:
        try:
            speed = tokens_per_s(replace(spec, batch_size=batch_size))
        except EndedEarly:
            break
        print(f"{spec.name}: {batch_size} rows: {speed:,.0f} tokens/s", flush=True)
        is_slower = bool(speeds) and speed < max(speeds.values())
        speeds[batch_size] = speed
        if is_slower:
            break
    rule = f"no batch of {spec.preset} fits, or it cannot run at all: see above"
    require(bool(speeds), f"{spec.name}: {rule}")
    return speeds


def fastest(tuned: dict[int, float]) -> int:
    """Return the batch size with the most tokens per second."""
    return max(tuned, key=lambda batch_size: tuned[batch_size])


def in_turns(specs: Sequence[Spec]) -> dict[str, Any]:
    """Time contenders alternately, one process at a time; return setting and rows.

    Every second round has the reverse order.
    """
    blocks: dict[str, list[float]] = {spec.name: [] for spec in specs}
    workers: dict[str, Contender] = {}
    for turn in range(TURNS):
        for spec in specs[:: -1 if turn % 2 else 1]:
            with running(spec) as worker:
                for _ in range(BLOCKS):
                    worker.run(STEPS)
            worker.blocks = blocks[spec.name] = blocks[spec.name] + worker.blocks
            workers[spec.name] = worker
    results = setting(specs[0])
    results["rows"] = rows_of(list(workers.values()), peak_flops(results["hardware"]))
    print_rows(results["rows"], specs[0].device)
    return results
