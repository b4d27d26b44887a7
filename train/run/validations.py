"""The validation scores of a run, and which of them may be compared.

Two losses are comparable only if they are means over the same rows. Their names in
metrics.jsonl begin with one of these prefixes:

- `eval/`: scores while training and after the last step, of `eval.num_batches` batches.
  They are spread evenly over the set, and are the same rows at every step;
- `eval_whole/`: scores of the whole set after the last step;
- `eval_final/`: scores after the last step of more batches than those of `eval/`, if
  `eval.final_num_batches` is neither -1 nor enough for the whole set.

`eval/targets` is the number of targets that were scored. A start that scores other rows
than an earlier one has another number, and begins a new comparison.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from train.run.goodput import finite_float
from train.run.jsonl_reader import iterate_rows
from train.run.metrics import is_metrics_row

PART = "eval"
FINAL = "eval_final"
WHOLE = "eval_whole"
# What people read for each prefix, the most telling score first.
TITLES = {WHOLE: "whole set", FINAL: "final", PART: "validation"}


class Validation(NamedTuple):
    """The score of an evaluation on the validation split."""

    step: int
    loss: float  # nats per token
    bits_per_byte: float | None = None

    def __str__(self) -> str:
        bits = self.bits_per_byte
        suffix = "" if bits is None else f", {bits:.4f} bits per byte"
        return f"{self.loss:.4f} nats a token{suffix}"


class Validations(NamedTuple):
    """The evaluations of a run.

    last: the last evaluation while training.
    best: the one with the lowest loss of those that scored the rows of `last`.
    targets: the number of targets in these rows.
    whole: the newest evaluation of the whole set.
    """

    last: Validation | None = None
    best: Validation | None = None
    targets: float | None = None
    whole: Validation | None = None


def read_validations(run_dir: epath.Path | Path) -> Validations:
    """Return the evaluations in the metrics of a run."""
    validations = Validations()
    for row in iterate_rows(run_dir, "metrics", is_metrics_row, b'"eval'):
        validations = updated_validations(validations, row["step"], row)
    return validations


def updated_validations(
    earlier: Validations, step: int, values: Mapping[str, Any]
) -> Validations:
    """Return the evaluations of a run, including the values of a new step."""
    if whole := validation_in(step, values, WHOLE):
        earlier = earlier._replace(whole=whole)
    new = validation_in(step, values, PART)
    if new is None:
        return earlier
    targets = values.get(f"{PART}/targets")
    best = earlier.best
    if best is None or targets != earlier.targets or new.loss < best.loss:
        best = new
    return earlier._replace(last=new, best=best, targets=targets)


def validation_in(
    step: int, values: Mapping[str, Any], prefix: str = PART
) -> Validation | None:
    """Return the score of the split among the values of a step, if it is finite."""
    loss = finite_float(values.get(f"{prefix}/loss"))
    if loss is None:
        return None
    return Validation(step, loss, finite_float(values.get(f"{prefix}/bits_per_byte")))


def headline(values: Mapping[str, Any]) -> str:
    """Return the prefix of the most telling scores that the values hold."""
    return next((prefix for prefix in TITLES if f"{prefix}/loss" in values), PART)
