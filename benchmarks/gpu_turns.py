"""Compare contenders on one GPU, of which each may need all of the memory.

Therefore only one contender's process runs at a time. `tune` finds the batch size with
which a contender processes most tokens per second. `in_turns` then runs the contenders
alternately, each time in a new process. `keep` writes the results to a file.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from etils import epath

from benchmarks.contenders import Contender, EndedEarly, print_rows, rows_of, setting
from benchmarks.step_worker import Spec
from data.storage import write_atomically
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


def read(file: Path | None) -> dict[str, Any]:
    """Return the results in the file by part; {} if there is no file."""
    return json.loads(file.read_text()) if file and file.exists() else {}


def keep(file: Path | None, part: str, values: dict[str, Any]) -> None:
    """Write the results of a part into the file, next to those of other parts."""
    if file:
        text = json.dumps({**read(file), part: values}, indent=1)
        write_atomically(epath.Path(file), text + "\n")


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


def in_turns(
    specs: Sequence[Spec], turns: int = TURNS, steps: int = STEPS
) -> Iterator[dict[str, Any]]:
    """Time contenders alternately, one process at a time.

    Every second round has the reverse order. A contender that ends early, for example
    because it ran out of memory, is left out from then on.

    Yields:
        After each process, the setting, the rows so far, and the kernels of each step.

    Raises:
        SystemExit: at the end, if a contender ended early.
    """
    results = setting(specs[0])
    peak = peak_flops(results["hardware"])
    workers: dict[str, Contender] = {}
    kernels: dict[str, dict[str, int]] = {}
    ended: set[str] = set()
    for turn in range(turns):
        for spec in specs[:: -1 if turn % 2 else 1]:
            if spec.name in ended:
                continue
            try:
                with running(spec) as worker:
                    for _ in range(BLOCKS):
                        worker.run(steps)
                    kernels[spec.name] = worker.ask("kernels")
            except EndedEarly:
                ended.add(spec.name)
                continue
            if spec.name in workers:
                worker.blocks = workers[spec.name].blocks + worker.blocks
            workers[spec.name] = worker
            rows = rows_of(list(workers.values()), peak)
            yield {**results, "rows": rows, "kernels": kernels}
    if workers:
        print_rows(rows_of(list(workers.values()), peak), specs[0].device)
    require(not ended, f"{', '.join(sorted(ended))} ended early: see above")
