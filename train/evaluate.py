"""`python -m train.evaluate run.dir=...`: score a checkpoint."""

import json

from train.cli.command import run_command
from train.config import EvaluateConfig


def main(asked: EvaluateConfig) -> int:
    """Print the score of a checkpoint on the run's validation split, as JSON."""
    import jax

    from train.evaluation import evaluate
    from train.load_run import load_run

    program, sources, step, params = load_run(asked, asked.batch_size)
    with jax.set_mesh(program.mesh):
        score = evaluate(program, params, sources, asked.num_batches)
    print(json.dumps({"step": step, **score._asdict()}))
    return 0


if __name__ == "__main__":
    run_command(main, "evaluate", EvaluateConfig)
