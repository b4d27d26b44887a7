"""Read and write the scores of a run, from training and from `train.evaluate`.

Each result of `train.evaluate` is a file, `evaluations/<step>-<hash>.json`, which holds
the step, the options under `asked`, and metrics with the names of `metrics.jsonl`. The
hash is computed from the options, so repeating an evaluation replaces its result.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from data.names import numbers_in
from data.storage import write_atomically
from train.records import damaged, json_compatible, record_or_warn
from train.run.validations import FINAL, WHOLE

log = logging.getLogger(__name__)

_REMEDY = "Its scores are left out. Run train.evaluate again to replace it."
_STDERR = "_stderr"
_SHOWN_AS_SUBJECT = ("tasks", "task_path", "sets")
_KINDS_WHILE_TRAINING = {"tasks/": "while training", f"{WHOLE}/": "", f"{FINAL}/": ""}


class ScoreText(NamedTuple):
    """One score of a model, formatted for people.

    subject: the task, the validation set, or "validation".
    options: the options of `train.evaluate` that influence the score.
    """

    subject: str
    metric: str
    value: str  # includes the standard error, if known
    step: int
    options: str


def write_evaluation(
    run_dir: epath.Path,
    step: int,
    options: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> epath.Path:
    """Write the metrics of an evaluation, and return the file.

    `options` holds the options of `train.evaluate` as JSON values, and `metrics` the
    values by their names in metrics.jsonl.

    Raises:
        OSError: the file was not written.
    """
    canonical = json.dumps(options, sort_keys=True).encode()
    options_hash = hashlib.sha256(canonical).hexdigest()[:8]
    file = run_dir / "evaluations" / f"{step}-{options_hash}.json"
    result = json_compatible({"step": step, "asked": options, **metrics})
    write_atomically(file, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return file


def read_scores(
    run_dir: epath.Path, rows: Sequence[Mapping[str, Any]]
) -> list[ScoreText]:
    """Return the newest task scores in the metrics, and the scores of evaluations."""
    scores = list[ScoreText]()
    for prefix, options in _KINDS_WHILE_TRAINING.items():
        rows_of_kind = [row for row in rows if any(k.startswith(prefix) for k in row)]
        for row in rows_of_kind[-1:]:
            metrics = {k: v for k, v in row.items() if k.startswith(prefix)}
            scores += format_scores(metrics, row["step"], options)
    for evaluation in _read_evaluations(run_dir / "evaluations"):
        step = evaluation.pop("step")
        requested = evaluation.pop("asked")
        options = " ".join(
            f"{key}={value:g}"
            for key, value in requested.items()
            if key not in _SHOWN_AS_SUBJECT and isinstance(value, int | float)
        )
        scores += format_scores(evaluation, step, options)
    return scores


def _read_evaluations(folder: epath.Path) -> Iterable[dict[str, Any]]:
    """Yield the evaluations, ascending by step."""
    files = sorted(folder.glob("*-*.json")) if folder.exists() else []
    steps = {file: numbers_in([file.name.partition("-")[0]]) for file in files}
    for file in sorted(filter(steps.get, files), key=lambda file: steps[file]):
        evaluation = record_or_warn(file, _REMEDY)
        if evaluation is not None and not _is_evaluation(evaluation):
            log.warning("%s", damaged(file, "does not hold scores", _REMEDY))
        elif evaluation is not None:
            yield evaluation


def _is_evaluation(evaluation: Mapping[str, Any]) -> bool:
    """Return whether a record holds a step, the options as a table, and numbers."""
    numbers = [value for key, value in evaluation.items() if key != "asked"]
    return (
        isinstance(evaluation.get("step"), int)
        and isinstance(evaluation.get("asked"), dict)
        and all(isinstance(number, int | float | None) for number in numbers)
    )


def format_scores(
    metrics: Mapping[str, float | None], step: int = 0, options: str = ""
) -> list[ScoreText]:
    """Format the scores of tasks and validation sets, each with its standard error."""
    scores = []
    for name, value in metrics.items():
        kind, *subject, metric = name.split("/")
        filters = []
        # A task's metric may end in a filter: tasks/gsm8k/exact_match/strict-match.
        if kind == "tasks" and len(subject) > 1:
            filters = [metric]
            metric = subject[1]
            subject = subject[:1]
        if metric.endswith(_STDERR):
            continue
        error = metrics.get("/".join([kind, *subject, metric + _STDERR, *filters]))
        text = "-" if value is None else f"{value:.4f}"
        text += "" if error is None else f" ± {error:.4f}"
        if metric == "targets":
            continue
        title = subject[0] if subject else "validation"
        title += ", whole" if kind == WHOLE else ""
        label = " ".join([metric, *filters])
        scores.append(ScoreText(title, label, text, step, options))
    return scores
