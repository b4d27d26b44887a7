"""Time training steps of PyTorch and Longhaul against each other, in alternation.

    python -m benchmarks.step --preset nano --json nano.json
    python -m benchmarks.step --preset gpt2_124m --device gpu
    python -m benchmarks.step --isa avx2    # float32, as on a CPU without AVX-512

Each contender is a process of its own that trains the same shape on the same token
batches, already on the device. Before any timing its loss must fall, and agree with
the first contender's. The slower PyTorch variants drop out after a short run; the
others take turns, block by block, so that load from elsewhere hits all alike.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_worker import MFU_CONVENTION, NUM_BATCHES, PRESETS
from data.machine import usable_cores
from train.hardware.chips import peak_flops

CHECK_STEPS = 5 * NUM_BATCHES  # first and last loss are of one batch
TORCH_KEPT = 2  # variants that reach the long run
# Compiled or eager, bfloat16 autocast or not, PyTorch's attention kernel or its own
# products and softmax ("written", the faster one on a CPU at a short context).
TORCH_VARIANTS = [
    f"torch-{mode}-{precision}{attention}"
    for mode in ("eager", "compile")
    for precision in ("f32", "bf16")
    for attention in ("", "-written")
]
# On a GPU one is known to be the fastest, and eight would not fit together.
DEFAULT_CONTENDERS = {
    "cpu": [*TORCH_VARIANTS, "longhaul"],
    "gpu": ["torch-compile-bf16", "longhaul"],
}


# What keeps each library from instructions that a CPU without them would not have.
NARROW = {
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}


class Contender:
    """A worker process, seen from the harness."""

    def __init__(self, name: str, options: argparse.Namespace, isa: str | None) -> None:
        self.name = name
        self.blocks: list[float] = []  # seconds of a step, one per block
        self.memory = 0
        arguments = [name, options.preset, options.device, str(options.threads)]
        arguments += [isa] if isa else []
        environment = {
            "OMP_NUM_THREADS": str(options.threads),
            **NARROW.get(isa or "", {}),
        }
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the GPU is shared
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step_worker", *arguments],
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
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early: see its message above")
        return json.loads(line)

    def run(self, num_steps: int) -> None:
        """Time one block."""
        answer = self.ask(f"run {num_steps}")
        self.blocks.append(answer["seconds"] / num_steps)
        self.memory = answer["bytes"]

    def quit(self) -> None:
        """End the process."""
        if self.process.stdin:
            self.process.stdin.close()  # ends its loop over lines
        self.process.wait()


def check(contenders: list[Contender]) -> None:
    """Warm every contender and compare losses on the same batch, 40 steps apart."""
    reference: list[float] = []
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
        if not losses[1] < 0.95 * losses[0]:
            raise SystemExit(f"{contender.name}: the loss does not fall")
        reference = reference or losses
        # 40 steps in bfloat16 part by a percent; Longhaul's weights are its own, too.
        tolerance = 0.02 if contender.name in TORCH_VARIANTS else 0.05
        if not np.allclose(losses, reference, rtol=tolerance, atol=0):
            raise SystemExit(f"{contender.name}: losses differ from {reference}")


def alternate(contenders: list[Contender], blocks: int, steps: int) -> None:
    """Time blocks of steps, turn by turn; every other round runs backwards."""
    for contender in contenders:
        contender.blocks.clear()
    for round_ in range(blocks):
        for contender in contenders[:: -1 if round_ % 2 else 1]:
            contender.run(steps)


def prune(contenders: list[Contender], steps: int) -> list[Contender]:
    """Keep the fastest PyTorch variants and everyone else."""
    alternate(contenders, 4, steps)
    by_time = sorted(contenders, key=lambda c: statistics.median(c.blocks))
    torch_names = [c.name for c in by_time if c.name in TORCH_VARIANTS]
    dropped = torch_names[TORCH_KEPT:]
    for contender in by_time:
        step_ms = 1e3 * statistics.median(contender.blocks)
        fate = ", dropped" if contender.name in dropped else ""
        print(f"short run: {contender.name} {step_ms:.2f} ms{fate}", flush=True)
        if fate:
            contender.quit()
    return [c for c in contenders if c.name not in dropped]


def check_narrow(options: argparse.Namespace, names: list[str]) -> dict[str, float]:
    """Compare a float32 product with all instructions to one with few.

    Returns:
        The speed with few over that with all, by library. Where it is near 1 the
        library may take wide instructions all the same, or never does.
    """
    first = {name.partition("-")[0]: name for name in reversed(names)}
    ratios = {}
    for library, name in first.items():
        both = [Contender(name, options, isa) for isa in (None, options.isa)]
        speeds = [[c.ask("product")["flops"] for c in both] for _ in range(5)]
        for contender in both:
            contender.quit()
        wide, narrow = (statistics.median(each) for each in zip(*speeds, strict=True))
        ratios[library] = narrow / wide
        verdict = "narrower" if narrow < 0.8 * wide else "nothing tells it is narrower"
        print(
            f"{library}: a float32 product at {wide / 1e9:.0f} GFLOP/s, with "
            f"{options.isa} at {narrow / 1e9:.0f}: {verdict}",
            flush=True,
        )
    return ratios


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
    gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return f"{gpus.splitlines()[0]}; {cpu}"


def report(contenders: list[Contender], options: argparse.Namespace) -> dict[str, Any]:
    """Print the table; return it as plain values."""
    shape, machine = PRESETS[options.preset], hardware(options.device)
    peak = peak_flops(machine)
    medians = {c.name: statistics.median(c.blocks) for c in contenders}
    best_torch = min((medians[n] for n in TORCH_VARIANTS if n in medians), default=None)
    versions = {}
    for package in ("torch", "jax", "jaxlib", "flax", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    rows = [
        {
            "contender": c.name,
            "step_ms": 1e3 * medians[c.name],
            "min_ms": 1e3 * min(c.blocks),
            "max_ms": 1e3 * max(c.blocks),
            "tokens_per_s": shape.tokens / medians[c.name],
            "speed_to_torch": best_torch and best_torch / medians[c.name],
            "memory_mib": c.memory / 2**20,
            "mfu": peak and shape.flops / medians[c.name] / peak,
            "blocks_ms": [1e3 * s for s in c.blocks],
        }
        for c in contenders
    ]
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": machine,
        "load_average": os.getloadavg(),
        "threads": options.threads,
        "versions": {"python": platform.python_version(), **versions},
        "preset": options.preset,
        "shape": asdict(shape),
        "mfu_convention": MFU_CONVENTION,
        "rows": rows,
    }
    for key in ("date", "hardware", "threads", "versions", "shape"):
        print(f"{key}: {result[key]}")
    memory = "peak host memory" if options.device == "cpu" else "peak GPU memory"
    print(f"speed: PyTorch's best is 1; memory: {memory}; MFU: {MFU_CONVENTION}\n")
    print("| contender | step ms (min..max) | tokens/s | speed | MiB | MFU |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        span = f"{row['step_ms']:.2f} ({row['min_ms']:.2f}..{row['max_ms']:.2f})"
        speed = f"{row['speed_to_torch']:.2f}" if row["speed_to_torch"] else "-"
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        print(
            f"| {row['contender']} | {span} | {row['tokens_per_s']:,.0f} | {speed} "
            f"| {row['memory_mib']:.0f} | {mfu} |"
        )
    return result


def main() -> None:
    """Check, prune, alternate, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="nano")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--contenders", help="names with commas between")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of one block")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", choices=NARROW, help="compute in float32 with no more")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = DEFAULT_CONTENDERS[options.device]
    if options.isa:  # no bfloat16
        names = [name for name in names if "bf16" not in name]
    if options.contenders:
        names = options.contenders.split(",")
    if unknown := set(names) - {*TORCH_VARIANTS, "longhaul"}:
        parser.error(f"--contenders: unknown {sorted(unknown)}")
    ratios = check_narrow(options, names) if options.isa else None
    contenders = [Contender(name, options, options.isa) for name in names]
    try:
        check(contenders)
        contenders = prune(contenders, options.steps)
        alternate(contenders, options.blocks, options.steps)
        result = report(contenders, options)
        result["narrow"] = {"isa": options.isa, "product": ratios}
    finally:
        for contender in contenders:
            contender.quit()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
