"""Measure the cost of checkpoints: `python -m benchmarks.checkpoint`.

The model is gpt2_124m. The program prints how long a save blocks the training loop,
relative to a step, and how long it takes until the files are written and hashed. Then
it restores the last checkpoint, checks that the state is equal to the saved one, and
compares the time with `dd`, which reads the same files. The page cache is dropped
before `dd` and before the restore if the system permits it (usually only to root).
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from etils import epath

from data.batch import Batch
from train.cli.command import compose
from train.config import CheckpointConfig
from train.resolve.program import ConfiguredProgram, make_program, settle
from train.run.checkpoint import Checkpoints
from train.run.digests import find_damage, step_bytes
from train.runtime import set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    options = parser.parse_args()
    overrides = ["model=gpt2_124m", "data.batch_size=8", "data.sequence_length=256"]
    config = settle(compose(overrides), 50304, 50257)
    set_up(config.runtime)
    program = make_program(config)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(program, folder, options.saves, options.steps)
    finally:
        shutil.rmtree(folder)


def measure(program: ConfiguredProgram, folder: Path, saves: int, steps: int) -> None:
    state = program.init()
    tokens = np.zeros((8, 256), np.int32)
    fields = (None if field is None else tokens for field in program.batch)
    batch = jax.device_put(Batch(*fields), program.batch_shardings)
    state, _ = jax.block_until_ready(program.train_step(state, batch))
    step_s = []
    for _ in range(steps):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(program.train_step(state, batch))
        step_s.append(time.perf_counter() - began)
    checkpoints = Checkpoints(epath.Path(folder / "checkpoints"), CheckpointConfig())
    blocking_s = []
    total_s = []
    rss = []
    for step in range(1, saves + 1):
        number = jax.device_put(np.int32(step), state.step.sharding)
        state = state._replace(step=number)
        began = time.perf_counter()
        checkpoints.save(step, state, {}, last=True)
        blocking_s.append(time.perf_counter() - began)
        checkpoints.wait()
        total_s.append(time.perf_counter() - began)
        rss.append(resident())
    last = folder / "checkpoints" / str(saves)
    bytes_saved = step_bytes(epath.Path(last))
    step_median = statistics.median(step_s)
    print(
        f"state             {bytes_saved / 1e9:.2f} GB on disk, 8 x 256 tokens a step"
    )
    print(f"step              {step_median:.2f} s, median of {steps}")
    for name, seconds in (
        ("blocks the loop", blocking_s),
        ("written, hashed", total_s),
    ):
        median = statistics.median(seconds)
        worst = max(seconds)
        print(
            f"{name:17s} {median:.3f} s median, {worst:.3f} s worst of {saves}: "
            f"{median / step_median:.1%} and {worst / step_median:.1%} of a step"
        )
    shown_saves = [n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n <= saves]
    shown = ", ".join(f"{rss[n - 1] / 1e9:.2f} GB" for n in shown_saves)
    print(f"resident memory   {shown} after save {', '.join(map(str, shown_saves))}")
    began = time.perf_counter()
    assert find_damage(epath.Path(last)) is None
    print(f"hashing           {time.perf_counter() - began:.2f} s, from memory")
    saved = jax.tree.map(np.asarray, state)
    dd = read_with_dd(last)
    dropped = drop_caches()
    began = time.perf_counter()
    restored = jax.block_until_ready(checkpoints.saved.restore(program.state))
    seconds = time.perf_counter() - began
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b), saved, restored)
    assert all(jax.tree.leaves(equal))
    origin = (
        "from the disk" if dropped else "from the page cache: not permitted to drop it"
    )
    print(
        f"restore           {seconds:.2f} s, checked and equal; dd {dd:.2f} s; {origin}"
    )
    checkpoints.close()


def read_with_dd(folder: Path) -> float:
    drop_caches()
    began = time.perf_counter()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            command = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"]
            subprocess.run(command, check=True)
    return time.perf_counter() - began


def drop_caches() -> bool:
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
