"""The training step of `python -m train` as a contender of the benchmarks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.step_worker import Shape
from data.batch import Batch
from train.cli.command import compose
from train.config import Platform, RuntimeConfig
from train.core.feed import place
from train.plan.compiled.inspection import inspect
from train.resolve.program import make_program
from train.runtime import set_up


def step_overrides(shape: Shape) -> list[str]:
    """Return the overrides of `python -m train` for nanoGPT's or Llama's model."""
    if shape.num_kv_heads:
        model = [
            "model=llama3_8b",
            "model.init=gpt2",  # as in PyTorch's model, so that losses can be compared
            f"model.num_kv_heads={shape.num_kv_heads}",
            f"model.mlp_dim={shape.mlp_dim}",
        ]
    else:
        model = [f"model.max_sequence_length={shape.context}"]
    return [
        "experiment=shakespeare_cpu",
        *model,
        f"model.num_layers={shape.num_layers}",
        f"model.num_heads={shape.num_heads}",
        f"model.embed_dim={shape.embed_dim}",
        f"model.vocab_size={shape.vocab_size}",
        f"data.sequence_length={shape.context}",
        f"data.batch_size={shape.batch_size}",
        "data.document_mask=false",
        "mesh=ddp",
        "schedule=constant",
        "schedule.warmup_steps=0",
    ]


class LonghaulWorker:
    """A model of a shape, which trains with AdamW at a constant learning rate.

    The class implements `benchmarks.step_worker.Worker`. Parameters are replicated on
    all devices (mesh=ddp).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        device: str,
        compute_dtype: str,
        overrides: Sequence[str] = (),
    ):
        """Compile the step."""
        platform = Platform.cuda if device == "gpu" else Platform.cpu
        set_up(RuntimeConfig(platform=platform))
        batches = shape.batches()
        _, B, length = batches.shape
        keys = [*step_overrides(shape), f"model.compute_dtype={compute_dtype}"]
        config = compose([*keys, *overrides])
        self._program = program = make_program(config)
        self._await = platform is Platform.cpu
        positions = np.broadcast_to(
            np.arange(length - 1, dtype=np.int32), (B, length - 1)
        )
        documents = 1 + 3 * positions // length  # 3 a row; used with document_mask=true
        self._batches = [
            place(Batch(b[:, :-1], b[:, 1:], documents, positions), program.batch)
            for b in batches
        ]
        self._state = program.init()
        self._step = program.train_step.lower(program.state, program.batch).compile()
        self._done = 0

    def kernels(self) -> dict[str, int]:
        """Return how often the compiled step calls each kernel of a library."""
        return inspect(self._step.as_text() or "", []).kernels

    def step_block(self, num_steps: int) -> tuple[float, float]:
        """Make `num_steps` updates; return their seconds and the last loss."""
        start = time.perf_counter()
        metrics = {}
        for _ in range(num_steps):
            batch = self._batches[self._done % len(self._batches)]
            self._state, metrics = self._step(self._state, batch)
            self._done += 1
            if self._await:
                jax.block_until_ready(metrics)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start, float(metrics["loss"])

    def device_peak_bytes(self) -> int | None:
        """Return the peak GPU memory in use so far; None on the CPU."""
        stats = None if self._await else jax.local_devices()[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else None


def square(matrix: np.ndarray) -> Callable[[], Any]:
    """Return a function that multiplies a matrix by itself on the CPU, and waits."""
    set_up(RuntimeConfig(platform=Platform.cpu))
    on_cpu = jax.device_put(matrix, jax.devices("cpu")[0])
    product = jax.jit(lambda x: x @ x)
    return lambda: jax.block_until_ready(product(on_cpu))
