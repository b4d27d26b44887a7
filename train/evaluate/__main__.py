"""`python -m train.evaluate run.dir=... tasks=[...]`: score a checkpoint."""

import json
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Gt

from train.cli.command import run_command
from train.cli.rules import must_name_run, set_mistakes
from train.config import (
    Config,
    Count,
    DistributedConfig,
    Number,
    RunConfig,
    RuntimeConfig,
    Step,
)
from train.errors import ConfigError, Mistake
from train.identity import run_dir
from train.watching import Batches, EvalSet

if TYPE_CHECKING:
    from train.distributed.processes import Cluster

log = logging.getLogger(__name__)
_OF_SETS = ("sets", "num_batches")
_OF_TASKS = ("task_path", "limit", "num_fewshot")


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
    mistakes, usual = must_name_run(config), EvaluateConfig()
    for key in _OF_SETS if config.tasks else _OF_TASKS:
        if (value := getattr(config, key)) != getattr(usual, key):
            rule = "is for validation sets, not for tasks (limit bounds these); leave "
            rule += "one of them out"
            if not config.tasks:
                rule = "is for tasks alone; name some: tasks=[hellaswag]"
            mistakes.append(Mistake(key, value, rule))
    return mistakes


def main(asked: EvaluateConfig) -> int:
    """Score a checkpoint on validation sets, or by tasks: print it, and keep it."""
    from train.distributed.processes import join

    cluster = join(asked.distributed, lambda: None)
    found = _by_tasks(asked, cluster) if asked.tasks else _on_sets(asked)
    if cluster.is_leader:
        _keep(asked, found)
    print(json.dumps({"step": found.step, **found.printed}))
    return 0


class Found(NamedTuple):
    """What came of it.

    asked: what makes it another question.
    metrics: by the names of metrics.jsonl.
    printed: the same as JSON, for programs: the last line.
    """

    step: int
    asked: dict[str, Any]
    metrics: dict[str, float]
    printed: dict[str, Any]


def _by_tasks(asked: EvaluateConfig, cluster: "Cluster") -> Found:
    """Judge by tasks, the same on all processes; print a table."""
    import jax

    from train.console import print_table
    from train.evaluate.tasks import Asked, Tasks, load_tasks
    from train.load_run import load_run
    from train.run.evaluations import format_scores

    wanted = Asked(asked.tasks, asked.task_path, asked.limit, asked.num_fewshot)
    loaded = dict[str, Any]()
    cluster.agree(lambda: loaded.update(load_tasks(wanted)) or {})
    place = asked.run, asked.runtime, asked.step
    program, sources, step, params = load_run(*place, asked.batch_size)
    tasks = Tasks(loaded, wanted, program, sources.encoding)
    cluster.agree(lambda: {"tasks": tasks.fingerprint[:12]})
    with jax.set_mesh(program.mesh):
        metrics = tasks.scores(params)
    rows = [row[:3] for row in format_scores(metrics)]
    title = f"tasks at step {step:,}, {tasks.num_examples:,} examples"
    print_table(rows, ["task", "metric", "value"], title)
    question = {key: getattr(asked, key) for key in ("tasks", *_OF_TASKS)}
    return Found(step, question, metrics, metrics)


def _on_sets(asked: EvaluateConfig) -> Found:
    """Score the validation split, and sets by name; print lines for people."""
    import jax

    from data.sources import open_sets
    from train.evaluate.results import score_lines
    from train.evaluate.validation import as_metrics, evaluate_all
    from train.load_run import load_run

    place = asked.run, asked.runtime, asked.step
    program, sources, step, params = load_run(*place, asked.batch_size)
    config = program.config
    if mistakes := [*set_mistakes(asked.sets, config.data, "sets")]:
        raise ConfigError(mistakes)
    paths = config.eval.paths | {name: each.path for name, each in asked.sets.items()}
    sources = open_sets(sources, config.data, paths, table="sets")
    with jax.set_mesh(program.mesh):
        scores = evaluate_all(program, params, sources, asked.num_batches)
    metrics, targets = as_metrics(scores), scores[""].num_targets
    print(f"evaluated   step {step:,}, on {targets:,} tokens")
    print("\n".join(score_lines(metrics)))
    printed: dict[str, Any] = scores.pop("")._asdict()
    if scores:
        printed["sets"] = {name: score._asdict() for name, score in scores.items()}
    limit = None if asked.num_batches == -1 else asked.num_batches
    question = {"sets": paths, "num_batches": limit}
    return Found(step, question, metrics, printed)


def _keep(asked: EvaluateConfig, found: Found) -> None:
    """Write what was found into the run's directory, and into its report."""
    from train.run.evaluations import write_evaluation
    from train.run.folder import run_folder
    from train.run.lease import read_owner
    from train.run.report import write_report

    folder = run_folder(run_dir(Config(run=asked.run)))
    try:
        file = write_evaluation(folder, found.step, found.asked, found.metrics)
        log.info("kept in %s", file)
        owner = read_owner(os.fspath(folder))
        if owner is None or owner.alive() is False:  # else it draws its report itself
            write_report(folder)
    except OSError as error:  # another's run, say, that is only to be read
        log.warning("%s: not written: %s", folder, error)


if __name__ == "__main__":
    run_command(main, "evaluate", EvaluateConfig, validate)
