"""One contender of `benchmarks.step`, in a process of its own.

It holds one shape's training step and does as many updates as it is asked for. The
shapes, and the batches that all contenders train on, are here too.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

NUM_BATCHES = 8  # distinct ones, used in turn
MFU_CONVENTION = "6N + 12 L C T per token, N without positions, causal not halved"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the batch."""

    num_layers: int
    num_heads: int
    embed_dim: int
    context: int
    batch_size: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.context

    @property
    def flops(self) -> float:
        """Model FLOPs of one step; see MFU_CONVENTION."""
        c, layers = self.embed_dim, self.num_layers
        matrices = 12 * layers * c * c + self.vocab_size * c
        return (6 * matrices + 12 * layers * c * self.context) * self.tokens

    def batches(self) -> np.ndarray:
        """Draw token ids (NUM_BATCHES, B, T + 1), frequent ones first (Zipf)."""
        weights = 1 / np.arange(1, self.vocab_size + 1)
        size = (NUM_BATCHES, self.batch_size, self.context + 1)
        ids = np.random.default_rng(0).choice(
            self.vocab_size, size=size, p=weights / weights.sum()
        )
        return ids.astype(np.int32)


PRESETS = {
    "nano": Shape(4, 4, 128, 64, 12, 384),
    "small": Shape(4, 8, 256, 256, 4, 4096),
    "gpt2_124m": Shape(12, 12, 768, 1024, 64, 50304),
    "gpt2_1558m": Shape(48, 25, 1600, 1024, 16, 50304),
}


@dataclass(frozen=True)
class Spec:
    """What a contender is, and is to do."""

    name: str
    preset: str
    device: str  # cpu or gpu
    threads: int
    float32: bool = False  # products, where the name does not tell
    batch_size: int | None = None  # another than the preset's
    overrides: tuple[str, ...] = ()  # of Longhaul's config
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """Of the preset, and the batch asked for."""
        shape = PRESETS[self.preset]
        return replace(shape, batch_size=self.batch_size or shape.batch_size)


class Worker(Protocol):
    """What a contender's process holds."""

    def step_block(self, num_steps: int) -> tuple[float, float]:
        """Do `num_steps` updates; return their seconds and the last one's loss."""
        ...

    def device_peak_bytes(self) -> int | None:
        """Most GPU memory ever allocated; None on the CPU."""
        ...

    def kernels(self) -> dict[str, int]:
        """How often the step calls each kernel of a library, where it can tell."""
        ...


def longhaul_worker(spec: Spec) -> Worker:
    """Build Longhaul's step, with float32 products or what `auto` takes."""
    from benchmarks.longhaul import LonghaulWorker

    shape = spec.shape
    return LonghaulWorker(
        shape.batches(),
        device=spec.device,
        compute_dtype="float32" if spec.float32 else "auto",
        overrides=spec.overrides,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        embed_dim=shape.embed_dim,
        vocab_size=shape.vocab_size,
    )


def torch_worker(spec: Spec) -> Worker:
    """Build the PyTorch variant that the name tells."""
    from benchmarks.torch_gpt import TorchWorker

    shape = spec.shape
    return TorchWorker(
        shape.batches(),
        compiled="compile" in spec.name,
        bfloat16="bf16" in spec.name,
        written_out="written" in spec.name,
        device="cuda" if spec.device == "gpu" else "cpu",
        num_threads=spec.threads,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        embed_dim=shape.embed_dim,
        context=shape.context,
        vocab_size=shape.vocab_size,
    )


def product_flops(name: str) -> float:
    """Time a float32 product of 1,024 x 1,024 matrices; return FLOPs a second."""
    if name == "longhaul":
        from benchmarks.longhaul import square
    else:
        from benchmarks.torch_gpt import square

    size = 1024
    product = square(np.random.default_rng(0).random((size, size), np.float32))
    product()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def main(text: str) -> None:
    """Answer `warm`, `run N`, `kernels` and `product` on stdin, one JSON line each.

    `warm` builds, compiles and does the first step. Host memory is the peak since
    then, so that a compiler's own does not count.
    """
    spec = Spec(**json.loads(text))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    worker: Worker | None = None

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "product":
            say({"flops": product_flops(spec.name)})
            continue
        if command == "warm":
            make = longhaul_worker if spec.name == "longhaul" else torch_worker
            worker = make(spec)
        assert worker is not None, "warm comes first"
        if command == "kernels":
            say(worker.kernels())
            continue
        seconds, loss = worker.step_block(int(arguments[0]) if arguments else 1)
        peak = worker.device_peak_bytes()
        say({"seconds": seconds, "loss": loss, "bytes": peak or host_peak_bytes()})
        reset = Path("/proc/self/clear_refs")
        if command == "warm" and reset.exists():
            reset.write_text("5")


def host_peak_bytes() -> int:
    """Read this process's peak resident memory."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
