"""How often a step takes the branches of its conditionals.

A part of the model identifies each of the three conditionals: attention with a window
(true) or without (model/parts/attention.py); rows that are sent to experts (true) or
gathered, because a device lacks the capacity (model/parts/experts/exchange.py); layers
in high precision (true) or not (model/segments.py).
"""

from collections.abc import Sequence

from model.config import ModelConfig
from model.mixer_catalog import kinds_of


def branch_counts(
    model: ModelConfig | None, part: str, count: float
) -> tuple[float, float]:
    """Return how often a conditional takes its false and its true branch.

    A conditional that is none of these three is assumed to take its true branch.

    `part` is the outermost part of the model around the conditional, or "" around whole
    layers. The `count` executions of the conditional are divided as all layers of the
    model are, also in a loop over some of them. So a loop of three trips may take a
    branch half a time. `model` may be None.
    """
    flags: Sequence[bool] = ()
    if model and part == "attention":
        layers = zip(model.mixers, model.windows, strict=True)
        kinds = kinds_of(model)
        flags = [w is not None for m, w in layers if kinds[m].attends]
    elif model and not part:
        flags = model.high_precision_flags
    if len({*flags}) < 2:
        return 0, count
    num_true = count * sum(flags) / len(flags)
    return count - num_true, num_true
