"""`python -m train.evaluate run.dir=...`: score a checkpoint."""

import json
from dataclasses import dataclass, field

from train.cli.command import run_command
from train.cli.rules import must_name_run, set_mistakes
from train.config import Count, RunConfig, RuntimeConfig, Step
from train.watching import Batches, EvalSet


@dataclass(frozen=True)
class EvaluateConfig:
    """Keys of `python -m train.evaluate`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: Step | None = None  # of the checkpoint, or best; null: the newest
    num_batches: Batches = -1  # -1: the whole validation split
    batch_size: Count | None = None  # null: the run's
    sets: dict[str, EvalSet] = field(default_factory=dict)  # and the run's


def main(asked: EvaluateConfig) -> int:
    """Print the score of a checkpoint on the run's validation sets, as JSON."""
    import jax

    from data.sources import open_sets
    from train.errors import ConfigError
    from train.evaluate.validation import evaluate_all
    from train.load_run import load_run

    place = asked.run, asked.runtime, asked.step
    program, sources, step, params = load_run(*place, asked.batch_size)
    config = program.config
    if mistakes := [*set_mistakes(asked.sets, config.data, "sets")]:
        raise ConfigError(mistakes)
    paths = config.eval.paths | {name: each.path for name, each in asked.sets.items()}
    sources = open_sets(sources, config.data, paths)
    with jax.set_mesh(program.mesh):
        scores = evaluate_all(program, params, sources, asked.num_batches)
    score = scores.pop("")._asdict()
    sets = {name: score._asdict() for name, score in scores.items()}
    print(json.dumps({"step": step, **score} | ({"sets": sets} if sets else {})))
    return 0


if __name__ == "__main__":
    run_command(main, "evaluate", EvaluateConfig, must_name_run)
