"""How often a step takes the branches of its conditionals.

A part of the model identifies each of the three conditionals: attention with a window
(true) or without (model/attention/kernel.py); rows that are sent to experts (true) or
gathered, because a device lacks the capacity (model/experts/exchange.py); layers in
high precision (true) or not (model/stacks.py).
"""

from model.config import ModelConfig


def branch_counts(model: ModelConfig, part: str, count: int) -> tuple[int, int]:
    """Return how often a conditional takes its false and its true branch.

    Args:
        model: the model's config.
        part: the outermost part of the model around the conditional (`part_scope`):
            attention, mlp, or "" around whole layers.
        count: the executions of the conditional. They are divided as all layers of the
            model are, also if the conditional is in a loop over some of them.
    """
    if part == "mlp":
        return 0, count
    local_flags = [window is not None for window in model.windows]
    flags = local_flags if part == "attention" else model.high_precision_flags
    num_true = round(count * sum(flags) / len(flags))
    return count - num_true, num_true
