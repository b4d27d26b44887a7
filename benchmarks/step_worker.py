"""The worker process of one contender of `benchmarks.step` or `benchmarks.gpu`.

The process compiles the training step of one model shape, and makes as many updates as
its standard input requests. This module also defines the shapes, and the batches on
which all contenders train.
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

NUM_BATCHES = 8  # the number of different batches, which are used in turn
MFU_CONVENTION = "6N + 12 L C T per token, N without positions, causal not halved"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the batch.

    The model is GPT-2's without biases, or Llama's if the last two sizes are set.
    """

    num_layers: int
    num_heads: int
    embed_dim: int
    context: int
    batch_size: int
    vocab_size: int
    num_kv_heads: int | None = None
    mlp_dim: int | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in one step."""
        return self.batch_size * self.context

    @property
    def flops(self) -> float:
        """Model FLOPs of one step; see MFU_CONVENTION."""
        c = self.embed_dim
        layers = self.num_layers
        attention = 4 * c * c
        mlp = 8 * c * c
        if self.num_kv_heads and self.mlp_dim:
            attention = 2 * c * c + 2 * c * c * self.num_kv_heads // self.num_heads
            mlp = 3 * c * self.mlp_dim
        matrices = layers * (attention + mlp) + self.vocab_size * c
        return (6 * matrices + 12 * layers * c * self.context) * self.tokens

    def batches(self) -> np.ndarray:
        """Draw int32 token ids [NUM_BATCHES, B, T + 1]: id i has weight 1 / (i + 1)."""
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
    "llama_nano": Shape(4, 4, 128, 64, 12, 384, num_kv_heads=2, mlp_dim=384),
    # Four of the 32 layers of llama3_8b, with its embedding and head.
    "llama3_8b": Shape(4, 32, 4096, 4096, 4, 128256, num_kv_heads=8, mlp_dim=14336),
}


@dataclass(frozen=True)
class Spec:
    """The settings of a contender."""

    name: str  # a variant of PyTorch, or one that begins with "longhaul"
    preset: str
    device: str  # cpu or gpu
    threads: int
    float32: bool = False  # Longhaul's products; PyTorch's are part of the name
    batch_size: int | None = None  # None: the batch size of the preset
    overrides: tuple[str, ...] = ()  # overrides of Longhaul's config
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_longhaul(self) -> bool:
        """Whether Longhaul trains the model, and not PyTorch."""
        return self.name.startswith("longhaul")

    @property
    def shape(self) -> Shape:
        """The shape of the preset, with `batch_size` if it is set."""
        shape = PRESETS[self.preset]
        return replace(shape, batch_size=self.batch_size or shape.batch_size)


class Worker(Protocol):
    """A model in training, in a contender's process."""

    def step_block(self, num_steps: int) -> tuple[float, float]:
        """Make `num_steps` updates; return their seconds and the last loss."""
        ...

    def device_peak_bytes(self) -> int | None:
        """Return the peak GPU memory so far; None on the CPU."""
        ...

    def kernels(self) -> dict[str, int]:
        """Return how often the step calls each kernel of a library; {} if unknown."""
        ...


def longhaul_worker(spec: Spec) -> Worker:
    """Build Longhaul's step, with float32 products or those of compute_dtype=auto."""
    from benchmarks.longhaul import LonghaulWorker

    return LonghaulWorker(
        spec.shape,
        device=spec.device,
        compute_dtype="float32" if spec.float32 else "auto",
        overrides=spec.overrides,
    )


def torch_worker(spec: Spec) -> Worker:
    """Build the PyTorch variant that the contender's name describes."""
    from benchmarks.torch_gpt import TorchWorker

    return TorchWorker(
        spec.shape,
        compiled="compile" in spec.name,
        bfloat16="bf16" in spec.name,
        written_out="written" in spec.name,
        device="cuda" if spec.device == "gpu" else "cpu",
        num_threads=spec.threads,
    )


def product_flops(name: str) -> float:
    """Time a float32 product of 1,024 x 1,024 matrices on the CPU; return FLOP/s."""
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
    """Answer the commands `warm`, `run N`, `kernels` and `product` with a JSON line.

    Commands come on stdin, one a line; `text` is the contender's `Spec` as JSON. `warm`
    builds and compiles the step, and takes the first step. On a CPU, `bytes` is the
    peak of host memory since `warm`, so that it excludes the compiler's memory.
    """
    spec = Spec(**json.loads(text))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries goes to stderr, not between the answers.
    worker: Worker | None = None

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=output, flush=True)

    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "product":
            say({"flops": product_flops(spec.name)})
            continue
        if command == "warm":
            make = longhaul_worker if spec.is_longhaul else torch_worker
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
    """Return this process's peak resident memory."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
