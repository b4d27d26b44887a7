"""Measure the CPU time that the host needs to dispatch one training step.

    python -m benchmarks.dispatch

The model has the parameter tree of gpt2_124m but a width of only 16, so that the
devices have little to do. The result is the CPU time of the thread that calls the step.
"""

import statistics
import time

import jax
import numpy as np

from data.batch import Batch
from train.cli.command import compose
from train.config import Platform, RuntimeConfig
from train.core.feed import place
from train.resolve.program import make_program
from train.runtime import set_up


def main() -> None:
    """Print the median CPU time over 300 steps, in milliseconds."""
    set_up(RuntimeConfig(platform=Platform.cpu, cpu_devices=1))
    tiny = ("num_heads=2", "embed_dim=16", "vocab_size=128", "max_sequence_length=16")
    config = compose(
        [
            "model=gpt2_124m",
            *(f"model.{override}" for override in tiny),
            "data.sequence_length=16",
            "data.batch_size=2",
        ]
    )
    program = make_program(config)
    ids = np.ones((2, 16), np.int32)
    spent = []
    batch = place(Batch(ids, ids, ids, ids), program.batch)
    state = program.init()
    step = program.train_step.lower(program.state, program.batch).compile()
    for _ in range(300):
        began = time.thread_time()
        state, metrics = step(state, batch)
        spent.append(1e3 * (time.thread_time() - began))
        jax.block_until_ready(metrics)
    leaves = len(jax.tree.leaves(program.state))
    median = statistics.median(spent)
    print(f"dispatch: {median:.3f} ms of CPU time a step, {leaves} leaves of state")


if __name__ == "__main__":
    main()
