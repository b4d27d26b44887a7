"""Contenders for one GPU, a process at a time: both may want all of its memory.

Of each the batch is found with which it makes most tokens a second; then they take
turns, each turn a process of its own.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.contenders import Contender, EndedEarly, print_rows, rows_of, setting
from benchmarks.step_worker import Spec
from train.hardware.chips import peak_flops

BATCH_SIZES = {  # tried from the smallest, until no more fit or speed falls
    "nano": (12, 24),
    "gpt2_124m": (16, 32, 64, 128),
    "gpt2_1558m": (4, 8, 16, 32),
}
BLOCKS, STEPS, TURNS = 3, 20, 3  # of each contender; a turn is that many blocks


def require(holds: bool, otherwise: str) -> None:
    """Fail a part, with what is wrong."""
    if not holds:
        raise SystemExit(otherwise)


@contextmanager
def running(spec: Spec) -> Iterator[Contender]:
    """Have a contender that has done its first step."""
    worker = Contender(spec)
    try:
        worker.ask("warm")
        yield worker
    finally:
        worker.quit()


def tokens_per_s(spec: Spec) -> float:
    """Time a contender alone."""
    with running(spec) as worker:
        for _ in range(BLOCKS):
            worker.run(STEPS)
    return spec.shape.tokens / statistics.median(worker.blocks)


def tune(spec: Spec) -> dict[int, float]:
    """Return tokens a second by batch size, up to the first that is worse or too much.

    Raises:
        SystemExit: none fits.
    """
    found: dict[int, float] = {}
    for batch_size in BATCH_SIZES[spec.preset]:
        try:
            speed = tokens_per_s(replace(spec, batch_size=batch_size))
        except EndedEarly:
            break
        print(f"{spec.name}: {batch_size} rows: {speed:,.0f} tokens/s", flush=True)
        worse = bool(found) and speed < max(found.values())
        found[batch_size] = speed
        if worse:
            break
    rule = f"no batch of {spec.preset} fits, or it cannot run at all: see above"
    require(bool(found), f"{spec.name}: {rule}")
    return found


def fastest(tuned: dict[int, float]) -> int:
    """Return the batch size of most tokens a second."""
    return max(tuned, key=lambda batch_size: tuned[batch_size])


def in_turns(specs: Sequence[Spec]) -> dict[str, Any]:
    """Time contenders, one process at a time; every other round runs backwards."""
    blocks: dict[str, list[float]] = {spec.name: [] for spec in specs}
    ended: dict[str, Contender] = {}
    for turn in range(TURNS):
        for spec in specs[:: -1 if turn % 2 else 1]:
            with running(spec) as worker:
                for _ in range(BLOCKS):
                    worker.run(STEPS)
            worker.blocks = blocks[spec.name] = blocks[spec.name] + worker.blocks
            ended[spec.name] = worker
    found = setting(specs[0])
    found["rows"] = rows_of(list(ended.values()), peak_flops(found["hardware"]))
    print_rows(found["rows"], specs[0].device)
    return found
