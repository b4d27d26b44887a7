"""`python -m train.evaluate run.dir=... tasks=[...]`: score a checkpoint."""

import json
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt

from train.cli.command import run_command
from train.cli.rules import must_name_run, set_mistakes
from train.config import (
    Count,
    DistributedConfig,
    Number,
    RunConfig,
    RuntimeConfig,
    Step,
)
from train.errors import ConfigError, Mistake
from train.watching import Batches, EvalSet


@dataclass(frozen=True)
class EvaluateConfig:
    """Keys of `python -m train.evaluate`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    step: Step | None = None  # of the checkpoint, or best; null: the newest
    num_batches: Batches = -1  # -1: the whole validation split
    batch_size: Count | None = None  # null: the run's
    sets: dict[str, EvalSet] = field(default_factory=dict)  # and the run's
    # Of lm-evaluation-harness, instead of the validation split: [hellaswag, piqa].
    tasks: list[str] = field(default_factory=list)
    task_path: str | None = None  # a folder of task files of one's own
    # Examples of each task; below 1: this part of them; null: all.
    limit: Annotated[float, Gt(0)] | None = None
    num_fewshot: Number | None = None  # examples shown first; null: as the task says


def validate(config: EvaluateConfig) -> list[Mistake]:
    """List the mistakes: no run, or keys that do not go together."""
    mistakes = must_name_run(config)
    of_tasks = ("task_path", "limit", "num_fewshot")
    for key in ("sets",) if config.tasks else of_tasks:
        if value := getattr(config, key):
            rule = "is not for tasks; leave one of them out"
            if not config.tasks:
                rule = "is for tasks alone; name some: tasks=[hellaswag]"
            mistakes.append(Mistake(key, value, rule))
    return mistakes


def main(asked: EvaluateConfig) -> int:
    """Print the score of a checkpoint on validation sets, or by tasks, as JSON."""
    import jax

    from data.sources import open_sets
    from train.console import print_table
    from train.distributed.processes import join
    from train.evaluate.tasks import Asked, Tasks, load_tasks, task_rows
    from train.evaluate.validation import evaluate_all
    from train.load_run import load_run

    how = asked.task_path, asked.limit, asked.num_fewshot
    wanted = Asked(asked.tasks, *how)
    loaded = load_tasks(wanted) if asked.tasks else None
    join(asked.distributed, lambda: None)
    place = asked.run, asked.runtime, asked.step
    program, sources, step, params = load_run(*place, asked.batch_size)
    if loaded:
        tasks = Tasks(loaded, wanted, program, sources.encoding)
        with jax.set_mesh(program.mesh):
            metrics = tasks.scores(params)
        title = f"tasks at step {step:,}"
        print_table(task_rows(metrics), ["task", "metric", "value", ""], title)
        print(json.dumps({"step": step, **metrics}))
        return 0
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
    run_command(main, "evaluate", EvaluateConfig, validate)
