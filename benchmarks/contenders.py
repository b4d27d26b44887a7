"""The worker processes that `benchmarks.step` and `benchmarks.gpu` compare."""

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
CHECK_STEPS = 5 * NUM_BATCHES  # a multiple: first and last loss use the same batch


class EndedEarly(SystemExit):
    """A worker process ended early, for example because it ran out of memory."""


class Contender:
    """A worker process (benchmarks/step_worker.py) and its measurements."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.name = spec.name
        self.blocks: list[float] = []  # the seconds per step of each block of steps
        self.memory = 0
        environment = {
            "OMP_NUM_THREADS": str(spec.threads),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # Contenders share the GPU.
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
        """Send a command to the worker process, and return its answer.

        Raises:
            EndedEarly: if the process has ended.
        """
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
        """Time one block of steps, and record the seconds per step and the memory."""
        answer = self.ask(f"run {num_steps}")
        self.blocks.append(answer["seconds"] / num_steps)
        self.memory = answer["bytes"]

    def quit(self) -> None:
        """End the process."""
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):  # The process has ended.
                self.process.stdin.close()  # Ends the worker's loop over commands.
        self.process.wait()


def check(contenders: list[Contender]) -> list[Contender]:
    """Compile each contender, and check its losses before and after 40 steps.

    The loss must fall and must agree with the first contender's. A PyTorch variant
    that fails is ended; on a CPU without bfloat16 some do.

    Returns:
        The contenders that pass.

    Raises:
        SystemExit: if Longhaul or the first contender fails.
    """
    reference: list[float] = []
    passing = []
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
        # After 40 steps, losses in bfloat16 and float32 differ by about a percent.
        # Longhaul also starts from other random weights than the PyTorch variants.
        tolerance = 0.02 if contender.name != "longhaul" else 0.05
        if not losses[1] < 0.95 * losses[0]:
            problem = "the loss does not fall"
        elif not np.allclose(losses, reference, rtol=tolerance, atol=0):
            problem = f"losses differ from {reference}"
        else:
            passing.append(contender)
            continue
        if contender.name == "longhaul" or contender is contenders[0]:
            raise SystemExit(f"{contender.name}: {problem}")
        print(f"{contender.name}: {problem}, left out", flush=True)
        contender.quit()
    return passing


def alternate(contenders: list[Contender], blocks: int, steps: int) -> None:
    """Time `blocks` blocks of each contender, one contender after the other.

    Every second round has the reverse order, so that no contender is always first.
    """
    for contender in contenders:
        contender.blocks.clear()
    for round_ in range(blocks):
        for contender in contenders[:: -1 if round_ % 2 else 1]:
            contender.run(steps)


def hardware(device: str) -> str:
    """Return the name of the processor, and of the GPU if `device` is not "cpu"."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [s for s in info.read_text().splitlines() if "model name" in s]
        model = lines[0].split(":")[1].strip() if lines else model
    cpu = f"{model}, {usable_cores()} cores"
    if device == "cpu":
        return cpu
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # Do not lose the measurements.
        return f"a GPU that nvidia-smi does not name; {cpu}"
    return f"{gpus.stdout.splitlines()[0]}; {cpu}"


def setting(spec: Spec) -> dict[str, Any]:
    """Return the date, hardware, versions and shapes of a measurement."""
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
    """Return a table row for each contender, with the median over its blocks.

    `peak` is the peak FLOP/s of the hardware, or None if it is unknown.
    """
    rows = []
    for c in contenders:
        seconds = statistics.median(c.blocks)
        shape = c.spec.shape
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
    pairs = zip(contenders, rows, strict=True)
    torch = [row["tokens_per_s"] for c, row in pairs if not c.spec.is_longhaul]
    for row in rows:
        row["speed_to_torch"] = row["tokens_per_s"] / max(torch) if torch else None
    return rows


def print_rows(rows: list[dict], device: str) -> None:
    """Print the rows of `rows_of` as a Markdown table."""
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
