"""What a run was given marks for: by tasks as it trained, and by `train.evaluate`.

Each answer of `train.evaluate` is a file, `evaluations/<step>-<what was asked>.json`:
the step, what was asked, and the numbers under the names that `metrics.jsonl` has for
them. The same question again replaces its answer.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from data.storage import write_atomically
from train.run.records import damaged, json_compatible, record_or_warn

log = logging.getLogger(__name__)

_REMEDY = "Its scores are left out. Ask train.evaluate again, which writes it anew."
_STDERR = "_stderr"
_WHAT = ("tasks", "task_path", "sets")  # the names of the scores say it
_IN_RUN = "while training"


class Scored(NamedTuple):
    """A number that a model was given, as people read it.

    of: the task, the validation set, or "validation".
    how: keys of `train.evaluate` that bear on it.
    """

    of: str
    metric: str
    value: str  # with the standard error, where there is one
    step: int = 0
    how: str = ""


def write_evaluation(
    run_dir: epath.Path,
    step: int,
    asked: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> epath.Path:
    """Write what was found at a step, and return the file.

    Args:
        run_dir: of the run.
        step: of the checkpoint.
        asked: what makes it another question, as JSON.
        metrics: numbers by the names of metrics.jsonl.

    Raises:
        OSError: it was not written.
    """
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    file = run_dir / "evaluations" / f"{step}-{name}.json"
    found = json_compatible({"step": step, "asked": asked, **metrics})
    write_atomically(file, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return file


def scores(run_dir: epath.Path, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """Return the newest scores by tasks of a run's metrics, and all evaluations."""
    judged = [row for row in rows if any(key.startswith("tasks/") for key in row)]
    found = [
        each._replace(step=row["step"], how=_IN_RUN)
        for row in judged[-1:]
        for each in scored({k: v for k, v in row.items() if k.startswith("tasks/")})
    ]
    for answer in _read(run_dir / "evaluations"):
        step, asked = answer.pop("step"), answer.pop("asked")
        how = " ".join(
            f"{key}={value:g}"
            for key, value in asked.items()
            if key not in _WHAT and isinstance(value, int | float)
        )
        found += (each._replace(step=step, how=how) for each in scored(answer))
    return found


def _read(folder: epath.Path) -> Iterable[dict[str, Any]]:
    """Yield what was found, by step."""
    files = [*folder.glob("*-*.json")] if folder.exists() else []
    numbered = [(file.name.partition("-")[0], file) for file in files]
    for _, file in sorted((int(n), file) for n, file in numbered if n.isdigit()):
        found = record_or_warn(file, _REMEDY)
        if found is None:
            continue
        if _is_answer(found):
            yield found
        else:
            log.warning("%s", damaged(file, "does not hold scores", _REMEDY))


def _is_answer(found: Mapping[str, Any]) -> bool:
    """Return whether a file holds a step, what was asked, and numbers."""
    numbers = [value for key, value in found.items() if key != "asked"]
    return (
        isinstance(found.get("step"), int)
        and isinstance(found.get("asked"), dict)
        and all(isinstance(number, int | float | None) for number in numbers)
    )


def scored(metrics: Mapping[str, float | None]) -> list[Scored]:
    """Return scores of tasks and sets, by name, for people: each with its error."""
    found = []
    for name, value in metrics.items():
        kind, *of, metric = name.split("/")
        chosen = []
        if kind == "tasks" and len(of) > 1:  # tasks/gsm8k/exact_match/strict-match
            of, metric, chosen = of[:1], of[1], [metric]
        if metric.endswith(_STDERR):
            continue
        error = metrics.get("/".join([kind, *of, metric + _STDERR, *chosen]))
        shown = "-" if value is None else f"{value:.4f}"
        shown += "" if error is None else f" ± {error:.4f}"
        of = of or ["validation"]
        found.append(Scored(of[0], " ".join([metric, *chosen]), shown))
    return found
