"""Score a run while it trains, always on the same rows, and after its last step."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from data.batches import num_validation_batches
from data.sources import Sources
from train.core.services import Validation
from train.evaluate.validation import (
    Score,
    all_sets,
    are_whole,
    as_metrics,
    evaluate_all,
)
from train.resolve.program import ConfiguredProgram
from train.run.validations import FINAL, PART, WHOLE, Validations
from train.run.validations import Validation as RecordedValidation
from train.start_parts import TaskScores
from train.units import format_seconds


class Evaluator:
    """Scores the states of one start on the validation sets."""

    def __init__(
        self,
        program: ConfiguredProgram,
        sources: Sources,
        tasks: TaskScores | None = None,
        *,
        earlier: Callable[[], Validations] = Validations,
        heartbeat: Callable[[], None] = lambda: None,
    ):
        """Remember what to score, and call `heartbeat` after each batch.

        `tasks` are those of `eval.tasks`, and `earlier` returns the evaluations so far.
        """
        self._program = program
        self._sources = sources
        self._tasks = tasks
        self._earlier = earlier
        self._heartbeat = heartbeat
        self._newest: dict[str, Score] = {}
        self._batch_ends: list[float] = []  # of the newest evaluation

    def validate(self, step: int, params: Any) -> Validation:
        """Score parameters on the rows that every step is scored on."""
        num_batches = self._program.config.eval.num_training_batches
        self._newest = self._evaluate(params, num_batches)
        return Validation(
            metrics=as_metrics(self._newest, PART),
            line=_validation_line(step, self._newest, self._earlier()),
            loss=self._newest[""].loss,
            num_targets=self._newest[""].num_targets,
        )

    def score_tasks(self, params: Any) -> dict[str, float]:
        """Score parameters on `eval.tasks`; return {} if there are none."""
        if self._tasks is None:
            return {}
        return self._tasks.score(params, self._heartbeat)

    def score_at_end(self, params: Any, announce: bool) -> dict[str, dict[str, Score]]:
        """Return the scores of the last step, by their prefix.

        The first are those of the newest call of `validate`, which must have been that
        of the last step. With `announce`, stderr says how long the others take.
        """
        evaluations = {PART: self._newest}
        settings = self._program.config.eval
        num_batches = settings.num_final_batches
        if are_whole(self._newest):
            return evaluations | {WHOLE: self._newest}
        if 0 <= num_batches <= settings.num_training_batches:
            return evaluations
        if announce:
            print(self._announcement(num_batches), file=sys.stderr, flush=True)
        scores = self._evaluate(params, num_batches)
        return evaluations | {WHOLE if are_whole(scores) else FINAL: scores}

    def _announcement(self, num_batches: int) -> str:
        """Say how long an evaluation takes, and how to cut it."""
        config = self._program.config
        sets = all_sets(self._program, self._sources)
        sizes = [num_validation_batches(s, config.data) for s in sets.values()]
        if num_batches >= 0:
            sizes = [min(size, num_batches) for size in sizes]
        total = sum(sizes)
        ends = self._batch_ends
        text = f"{total:,} batches of {config.data.batch_size} rows"
        if num_batches < 0:
            text = f"the whole validation set, {text}"
        if len(ends) > 1:  # The first batch may have waited for compilation.
            seconds = total * (ends[-1] - ends[0]) / (len(ends) - 1)
            text += f", about {format_seconds(seconds)}"
        cut = config.eval.num_training_batches
        return f"last score  {text}. To score fewer: eval.num_batches={cut}"

    def _evaluate(self, params: Any, num_batches: int) -> dict[str, Score]:
        self._batch_ends = []

        def beat() -> None:
            self._batch_ends.append(time.monotonic())
            self._heartbeat()

        return evaluate_all(self._program, params, self._sources, num_batches, beat)


def _validation_line(
    step: int, scores: Mapping[str, Score], earlier: Validations
) -> str:
    """Return one line with an evaluation's scores and the best earlier loss."""
    score = scores[""]
    best = earlier.best
    phrases = [f"{RecordedValidation(step, score.loss, score.bits_per_byte)}"]
    phrases += [f"{name} {score.loss:.4f}" for name, score in scores.items() if name]
    if best and earlier.targets == score.num_targets:
        earlier_best = f"best {best.loss:.4f} at step {best.step:,}"
        is_best = score.loss < best.loss
        phrases.append("the best so far" if is_best else earlier_best)
    return f"step {step:,}  validation {'; '.join(phrases)}"
