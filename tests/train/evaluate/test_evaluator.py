"""A run is scored while it trains and after its last step."""

from types import SimpleNamespace
from typing import Any

import pytest

from train.cli.command import compose
from train.evaluate import evaluator as module
from train.evaluate.evaluator import Evaluator
from train.evaluate.validation import Score, as_metrics

AVAILABLE = 40  # the number of batches of the whole set

# Each case has the overrides, the numbers of scored batches in order, and the prefixes
# of the last step's scores.
CASES = {
    "by default": ((), [16, -1], ["eval", "eval_whole"]),
    "cut by one key": (("eval.num_batches=2",), [2], ["eval"]),
    "cut, but the end is whole": (
        ("eval.num_batches=2", "eval.final_num_batches=-1"),
        [2, -1],
        ["eval", "eval_whole"],
    ),
    "more at the end": (
        ("eval.num_batches=2", "eval.final_num_batches=5"),
        [2, 5],
        ["eval", "eval_final"],
    ),
    "so many at the end that they are all": (
        ("eval.final_num_batches=400",),
        [16, 400],
        ["eval", "eval_whole"],
    ),
    "fewer at the end": (("eval.final_num_batches=1",), [16], ["eval"]),
    "always the whole set": (
        ("eval.num_batches=-1",),
        [-1],
        ["eval", "eval_whole"],
    ),
    "a small set": (("eval.num_batches=64",), [64], ["eval", "eval_whole"]),
    "a small set, whole at the end": (
        ("eval.num_batches=64", "eval.final_num_batches=-1"),
        [64],
        ["eval", "eval_whole"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_step_is_scored_on_the_same_rows_and_then_on_the_whole_set(
    monkeypatch, capsys, name
):
    overrides, wanted, prefixes = CASES[name]
    batch_counts = []

    def evaluate_all(program, params, sources, num_batches, heartbeat):
        batch_counts.append(num_batches)
        for _ in range(3):
            heartbeat()
        is_whole = not 0 <= num_batches < AVAILABLE
        return {"": Score(float(len(batch_counts)), 1.0, num_batches, is_whole)}

    monkeypatch.setattr(module, "evaluate_all", evaluate_all)
    monkeypatch.setattr(module, "num_validation_batches", lambda *args: AVAILABLE)
    program: Any = SimpleNamespace(config=compose(overrides))
    sources: Any = SimpleNamespace(validation_sets=lambda by_source: {})
    beats = []
    evaluator = Evaluator(program, sources, heartbeat=lambda: beats.append(1))
    first = evaluator.validate(1, {})
    scores = evaluator.score_at_end({}, announce=True)
    assert [*scores] == prefixes
    assert as_metrics(scores["eval"], "eval") == first.metrics
    assert batch_counts == wanted
    assert len(beats) == 3 * len(batch_counts)
    shown = capsys.readouterr().err
    assert bool(shown) == (len(wanted) > 1)
    if shown:
        length = AVAILABLE if not 0 <= wanted[1] < AVAILABLE else wanted[1]
        rows = program.config.data.batch_size
        assert f"{length} batches of {rows} rows, about " in shown
        assert f"eval.num_batches={wanted[0]}" in shown
