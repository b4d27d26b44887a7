"""Lion: the sign of a momentum.

Source: Chen et al., arXiv:2302.06675, algorithm 2.
"""

from collections.abc import Collection

import optax

from train.config import OptimizerConfig
from train.core.optimizer.parts import RuleInputs, UpdateRule
from train.core.optimizer.rates import ParamRates, with_rates


def make_lion(
    config: OptimizerConfig, inputs: RuleInputs
) -> optax.GradientTransformation:
    """Return Lion's transformation."""
    return with_rates(optax.scale_by_lion(config.b1, config.b2), inputs.rates)


def max_sign(config: OptimizerConfig, rates: Collection[ParamRates]) -> float:
    """Return the largest entry of Lion's direction, which is a sign."""
    return 1.0


LION = UpdateRule(make_lion, max_sign, updates_by_layer=True)
