"""The catalog has an update rule of its own for each optimizer."""

from train.config import OptimizerName
from train.optimizers.catalog import OPTIMIZERS


def test_each_optimizer_has_a_rule():
    assert OPTIMIZERS.rules.keys() == {*OptimizerName}


def test_no_two_optimizers_have_the_same_rule():
    assert len({*OPTIMIZERS.rules.values()}) == len(OptimizerName)
