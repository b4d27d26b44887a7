"""`python -m train.evaluate run.dir=...`: score a checkpoint."""

import json
from dataclasses import dataclass, field

from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Batches, Count, Number, RunConfig, RuntimeConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """Keys of `python -m train.evaluate`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: Number | None = None  # of the checkpoint; null: the newest
    num_batches: Batches = -1  # -1: the whole validation split
    batch_size: Count | None = None  # null: the run's


def main(asked: EvaluateConfig) -> int:
    """Print the score of a checkpoint on the run's validation split, as JSON."""
    import jax

    from train.evaluation import evaluate
    from train.load_run import load_run

    place = asked.run, asked.runtime, asked.step
    program, sources, step, params = load_run(*place, asked.batch_size)
    with jax.set_mesh(program.mesh):
        score = evaluate(program, params, sources, asked.num_batches)
    print(json.dumps({"step": step, **score._asdict()}))
    return 0


if __name__ == "__main__":
    run_command(main, "evaluate", EvaluateConfig, must_name_run)
