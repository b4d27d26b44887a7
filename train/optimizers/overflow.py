"""Decide whether updates may overflow float32."""

from collections.abc import Collection
from typing import assert_never

from train.config import OptimizerConfig, OptimizerName
from train.optimizers.groups import ParamRates


def may_overflow(config: OptimizerConfig, rates: Collection[ParamRates]) -> bool:
    """Return whether finite gradients may lead to weights that overflow float32.

    Updates that cannot overflow are not checked, because a check reads the whole state.
    Overflow is impossible if no step moves an entry by more than 1e12 and decay shrinks
    weights: then weights stay below 1e19 for 10 million steps, and their squares are
    finite. The mean of clipped gradients is at most clip_norm, so Adam's direction is
    at most clip_norm / ((1 - b1) epsilon). Lion's direction is at most 1, and Muon's is
    below the root of a dim. `rates` are those of all parameters.
    """
    match config.name:
        case OptimizerName.lion:
            max_direction = 1.0
        case OptimizerName.adafactor:
            return True
        case OptimizerName.adamw | OptimizerName.muon:
            if config.clip_norm is None:
                return True
            epsilon = config.epsilon * min(own.epsilon for own in rates)
            adam_bound = config.clip_norm / ((1 - config.b1) * epsilon)
            max_direction = max(1e6, adam_bound)
        case _:
            assert_never(config.name)
    return any(
        own.learning_rate * max_direction > 1e12
        or own.learning_rate * own.weight_decay > 1
        for own in rates
    )
