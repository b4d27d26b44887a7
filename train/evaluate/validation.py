"""Score parameters on the validation split and on named sets of text."""

import math
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import jax

from data.batches import num_validation_batches, validation_batches
from data.sources import Sources
from train.core.feed import Feed, local_rows
from train.resolve.program import ConfiguredProgram


class Score(NamedTuple):
    """Mean cross-entropy: `loss` in nats per token, and in bits per byte of text.

    num_targets: the number of targets that were scored.
    whole: whether these are all targets of the set.
    """

    loss: float
    bits_per_byte: float
    num_targets: int
    whole: bool = False


def evaluate(
    program: ConfiguredProgram,
    params: Any,
    sources: Sources,
    num_batches: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> Score:
    """Return the score of parameters on the validation split.

    Args:
        program: the model and its layout.
        params: sharded as `program.shardings.params`.
        sources: the tokens to predict.
        num_batches: the maximum number of batches, which are spread evenly over the
            split. -1 takes all batches, so that every target is scored once.
        heartbeat: called after each batch, to tell a watchdog of progress.
    """
    data = program.config.data
    whole = not 0 <= num_batches < num_validation_batches(sources, data)
    batches = validation_batches(
        sources, data, -1 if whole else num_batches, local_rows(program.batch)
    )
    nats = num_targets = 0.0
    for batch in Feed(batches, repeat(program.batch)):
        # The host sums in float64. The wait keeps a CPU from running two steps at once.
        batch_nats, batch_targets = jax.device_get(program.eval_step(params, batch))
        nats += float(batch_nats)
        num_targets += float(batch_targets)
        heartbeat()
    loss = nats / num_targets if num_targets else math.nan
    split = sources.held_out
    tokens_per_byte = sources.num_tokens(split) / sources.num_bytes(split)
    bits_per_byte = loss * tokens_per_byte / math.log(2)
    return Score(loss, bits_per_byte, int(num_targets), whole)


def evaluate_all(
    program: ConfiguredProgram,
    params: Any,
    sources: Sources,
    num_batches: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Return the scores of the split (""), each source of a mixture, and each set.

    The arguments have the same meaning as in `evaluate`.
    """
    return {
        name: evaluate(program, params, set_sources, num_batches, heartbeat)
        for name, set_sources in all_sets(program, sources).items()
    }


def all_sets(program: ConfiguredProgram, sources: Sources) -> dict[str, Sources]:
    """Return the sets that `evaluate_all` scores, by name."""
    return {"": sources, **sources.validation_sets(program.config.eval.by_source)}


def as_metrics(scores: Mapping[str, Score], prefix: str) -> dict[str, float]:
    """Return scores by their names in metrics.jsonl: `eval/loss`, `eval/<set>/loss`.

    `prefix` is one of those that train/run/validations.py describes.
    """
    values: dict[str, float] = {
        f"{prefix}/{name}/{key}".replace("//", "/"): getattr(score, key)
        for name, score in scores.items()
        for key in ("loss", "bits_per_byte")
    }
    return values | {f"{prefix}/targets": scores[""].num_targets}


def are_whole(scores: Mapping[str, Score]) -> bool:
    """Return whether each set was scored whole."""
    return all(score.whole for score in scores.values())
