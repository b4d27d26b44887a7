"""Contenders of `benchmarks.step` and `benchmarks.gpu`: processes, and their table."""

import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_worker import MFU_CONVENTION, NUM_BATCHES, Spec
from data.machine import usable_cores
from train.run.versions import versions

_LIBRARIES = ("torch", "jax", "jaxlib", "flax", "numpy")
CHECK_STEPS = 5 * NUM_BATCHES  # first and last loss are of one batch


class EndedEarly(SystemExit):
    """A worker is gone: out of memory, say."""


class Contender:
    """A worker process, seen from the harness."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.name = spec, spec.name
        self.blocks: list[float] = []  # seconds of a step, one per block
        self.memory = 0
        environment = {
            "OMP_NUM_THREADS": str(spec.threads),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the GPU is shared
            **spec.environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step_worker", json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **environment},
        )

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise EndedEarly(f"{self.name} ended early: see its message above")
        return json.loads(line)

    def run(self, num_steps: int) -> None:
        """Time one block."""
        answer = self.ask(f"run {num_steps}")
        self.blocks.append(answer["seconds"] / num_steps)
        self.memory = answer["bytes"]

    def quit(self) -> None:
        """End the process."""
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self.process.stdin.close()  # ends its loop over lines
        self.process.wait()


def check(contenders: list[Contender]) -> list[Contender]:
    """Warm every contender and compare losses on the same batch, 40 steps apart.

    Returns:
        The contenders without those of PyTorch that compute something else than the
        first, which are ended: on a CPU without bfloat16 some do.
    """
    reference: list[float] = []
    same = []
    for contender in contenders:
        start = contender.ask("warm")
        end = contender.ask(f"run {CHECK_STEPS}")
        losses = [start["loss"], end["loss"]]
        warm_s = start["seconds"]
        print(
            f"{contender.name}: loss {losses[0]:.4f} -> {losses[1]:.4f}, "
            f"first step {warm_s:.1f} s",
            flush=True,
        )
        reference = reference or losses
        # 40 steps in bfloat16 part by a percent; Longhaul's weights are its own, too.
        tolerance = 0.02 if contender.name != "longhaul" else 0.05
        if not losses[1] < 0.95 * losses[0]:
            wrong = "the loss does not fall"
        elif not np.allclose(losses, reference, rtol=tolerance, atol=0):
            wrong = f"losses differ from {reference}"
        else:
            same.append(contender)
            continue
        if contender.name == "longhaul" or contender is contenders[0]:
            raise SystemExit(f"{contender.name}: {wrong}")
        print(f"{contender.name}: {wrong}, left out", flush=True)
        contender.quit()
    return same


def alternate(contenders: list[Contender], blocks: int, steps: int) -> None:
    """Time blocks of steps, turn by turn; every other round runs backwards."""
    for contender in contenders:
        contender.blocks.clear()
    for round_ in range(blocks):
        for contender in contenders[:: -1 if round_ % 2 else 1]:
            contender.run(steps)


def hardware(device: str) -> str:
    """Name the processor, and the GPU where that is what is timed."""
    model, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():
        lines = [s for s in info.read_text().splitlines() if "model name" in s]
        model = lines[0].split(":")[1].strip() if lines else model
    cpu = f"{model}, {usable_cores()} cores"
    if device == "cpu":
        return cpu
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # figures are worth more
        return f"a GPU that nvidia-smi does not name; {cpu}"
    return f"{gpus.stdout.splitlines()[0]}; {cpu}"


def setting(spec: Spec) -> dict[str, Any]:
    """Say when, where and with what a measurement was made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(spec.device),
        "load_average": os.getloadavg(),
        "threads": spec.threads,
        "versions": {"python": platform.python_version(), **versions(_LIBRARIES)},
        "preset": spec.preset,
        "shape": asdict(spec.shape),
        "mfu_convention": MFU_CONVENTION,
    }


def rows_of(contenders: Sequence[Contender], peak: float | None) -> list[dict]:
    """Return a row for each contender, of the medians of its blocks.

    `peak` is the FLOPs a second that the hardware can do, if known.
    """
    rows = []
    for c in contenders:
        seconds, shape = statistics.median(c.blocks), c.spec.shape
        rows.append(
            {
                "contender": c.name,
                "batch_size": shape.batch_size,
                "overrides": c.spec.overrides,
                "environment": c.spec.environment,
                "step_ms": 1e3 * seconds,
                "min_ms": 1e3 * min(c.blocks),
                "max_ms": 1e3 * max(c.blocks),
                "tokens_per_s": shape.tokens / seconds,
                "memory_mib": c.memory / 2**20,
                "mfu": peak and shape.flops / seconds / peak,
                "blocks_ms": [1e3 * s for s in c.blocks],
            }
        )
    torch = [row["tokens_per_s"] for row in rows if row["contender"] != "longhaul"]
    for row in rows:
        row["speed_to_torch"] = row["tokens_per_s"] / max(torch) if torch else None
    return rows


def print_rows(rows: list[dict], device: str) -> None:
    """Print the table."""
    memory = "peak host memory" if device == "cpu" else "peak GPU memory"
    print(f"speed: PyTorch's best is 1; memory: {memory}; MFU: {MFU_CONVENTION}\n")
    print("| contender | rows | step ms (min..max) | tokens/s | speed | MiB | MFU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        span = f"{row['step_ms']:.2f} ({row['min_ms']:.2f}..{row['max_ms']:.2f})"
        speed = f"{row['speed_to_torch']:.2f}" if row["speed_to_torch"] else "-"
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        print(
            f"| {row['contender']} | {row['batch_size']} | {span} "
            f"| {row['tokens_per_s']:,.0f} | {speed} | {row['memory_mib']:.0f} "
            f"| {mfu} |",
            flush=True,
        )
