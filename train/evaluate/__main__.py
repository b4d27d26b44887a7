"""`python -m train.evaluate run.dir=... tasks=[...]`: score a checkpoint."""

import json
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Gt
from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import eval_set_mistakes, must_name_run
from train.config import (
    Batches,
    Config,
    Count,
    DistributedConfig,
    EvalSet,
    Number,
    RunConfig,
    RuntimeConfig,
    Step,
)
from train.errors import ConfigError
from train.identity import run_dir

if TYPE_CHECKING:
    from train.distributed.processes import Cluster

log = logging.getLogger(__name__)
_SET_KEYS = ("sets", "num_batches")
_TASK_KEYS = ("task_path", "limit", "num_fewshot")


@dataclass(frozen=True)
class EvaluateConfig:
    """Keys of `python -m train.evaluate`. The run's config.yaml gives all others."""

    run_schema = Config  # A catalog replaces it by a dataclass with added parts.

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    step: Annotated[
        Step | None, Doc("The step of the checkpoint, or best. null: the newest.")
    ] = None
    num_batches: Annotated[
        Batches,
        Doc(
            "The number of batches of each set, which are spread evenly over the set. "
            "-1 takes the whole set."
        ),
    ] = -1
    batch_size: Annotated[
        Count | None, Doc("The number of rows in a batch. null: the run's.")
    ] = None
    sets: Annotated[
        dict[str, EvalSet], Doc("Sets by name, in addition to the run's.")
    ] = field(default_factory=dict)
    tasks: Annotated[
        list[str],
        Doc(
            "Tasks of lm-evaluation-harness to score instead of the validation split, "
            "such as [hellaswag,piqa]."
        ),
    ] = field(default_factory=list)
    task_path: Annotated[
        str | None, Doc("A folder with further task files. null has none.")
    ] = None
    limit: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc(
            "The number of examples of each task, or below 1 the fraction of them. "
            "null takes all."
        ),
    ] = None
    num_fewshot: Annotated[
        Number | None,
        Doc("The number of examples in each prompt. null: what the task says."),
    ] = None


def evaluate_mistakes(config: EvaluateConfig) -> list[Mistake]:
    """List mistakes: a missing run, or keys that cannot be combined."""
    mistakes = must_name_run(config)
    defaults = EvaluateConfig()
    rule = "applies to tasks only; name some: tasks=[hellaswag]"
    if config.tasks:
        rule = "applies to validation sets only (for tasks, use limit); leave out this "
        rule += "key or tasks"
    for key in _SET_KEYS if config.tasks else _TASK_KEYS:
        if (value := getattr(config, key)) != getattr(defaults, key):
            mistakes.append(Mistake(key, value, rule))
    return mistakes


def main(config: EvaluateConfig) -> int:
    """Score a checkpoint on validation sets or on tasks; print and save the scores."""
    from train.distributed.joining import join

    run = run_dir(Config(run=config.run))
    cluster = join(config.distributed, run, lambda: None)
    evaluation = _score_tasks(config, cluster) if config.tasks else _score_sets(config)
    if cluster.is_leader:
        _save(config.run, evaluation)
    print(json.dumps({"step": evaluation.step, **evaluation.json_values}))
    return 0


class Evaluation(NamedTuple):
    """The scores of a checkpoint.

    options: the settings that distinguish this evaluation from others.
    metrics: the scores by their names in metrics.jsonl.
    json_values: the values that the last line of the output shows as JSON.
    """

    step: int
    options: dict[str, Any]
    metrics: dict[str, float]
    json_values: dict[str, Any]


def _score_tasks(config: EvaluateConfig, cluster: "Cluster") -> Evaluation:
    """Score the checkpoint on tasks, with the same result on all processes."""
    from train.console import print_table
    from train.evaluate.tasks import TaskRequest, Tasks, load_tasks
    from train.load_run import load_run
    from train.run.evaluations import format_scores

    path = config.task_path
    limit = config.limit
    num_fewshot = config.num_fewshot
    request = TaskRequest(config.tasks, path, limit, num_fewshot)
    task_dict = dict[str, Any]()
    cluster.agree(lambda: task_dict.update(load_tasks(request)) or {})
    program, sources, step, params = load_run(
        config.run,
        config.runtime,
        step=config.step,
        batch_size=config.batch_size,
        schema=config.run_schema,
    )
    tasks = Tasks(task_dict, request, program, sources.encoding)
    cluster.agree(lambda: {"tasks": tasks.fingerprint[:12]})
    metrics = tasks.score(params)
    rows = [row[:3] for row in format_scores(metrics)]
    title = f"tasks at step {step:,}, {tasks.num_examples:,} examples"
    print_table(rows, ["task", "metric", "value"], title)
    options = {key: getattr(config, key) for key in ("tasks", *_TASK_KEYS)}
    return Evaluation(step, options, metrics, json_values=metrics)


def _score_sets(config: EvaluateConfig) -> Evaluation:
    """Score the checkpoint on the validation split and named sets; print the scores."""
    from data.catalog import text_store
    from data.sources import open_sets
    from train.evaluate.results import score_lines
    from train.evaluate.validation import are_whole, as_metrics, evaluate_all
    from train.load_run import load_run
    from train.run.validations import PART, WHOLE

    program, sources, step, params = load_run(
        config.run,
        config.runtime,
        step=config.step,
        batch_size=config.batch_size,
        schema=config.run_schema,
    )
    data = program.config.data
    if mistakes := [*eval_set_mistakes(config.sets, data, "sets")]:
        raise ConfigError(mistakes)
    paths = program.config.eval.paths
    paths |= {name: eval_set.path for name, eval_set in config.sets.items()}
    sources = open_sets(sources, data, paths, text_store, table="sets")
    scores = evaluate_all(program, params, sources, config.num_batches)
    metrics = as_metrics(scores, WHOLE if are_whole(scores) else PART)
    print(f"evaluated   step {step:,}, on {scores[''].num_targets:,} tokens")
    print("\n".join(score_lines(metrics)))
    json_values: dict[str, Any] = scores.pop("")._asdict()
    if scores:
        json_values["sets"] = {name: score._asdict() for name, score in scores.items()}
    limit = None if config.num_batches == -1 else config.num_batches
    options = {"sets": paths, "num_batches": limit}
    return Evaluation(step, options, metrics, json_values)


def _save(run: RunConfig, evaluation: Evaluation) -> None:
    """Write an evaluation into the run's directory, and update the run's report."""
    from train.run.evaluations import write_evaluation
    from train.run.folder import run_folder
    from train.run.lease import read_owner
    from train.run.report import write_report

    folder = run_folder(run_dir(Config(run=run)))
    step, options, metrics, _ = evaluation
    try:
        log.info("saved in %s", write_evaluation(folder, step, options, metrics))
        owner = read_owner(os.fspath(folder))
        if owner is None or owner.alive() is False:  # A live owner writes the report.
            write_report(folder)
    except OSError as error:  # The run may be read-only, for example.
        log.warning("%s: not written: %s", folder, error)


COMMAND = Command(main, "evaluate", EvaluateConfig, evaluate_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
