"""Groups of parameters have their own rates and decays."""

from dataclasses import replace

import numpy as np
import pytest

from tests.train.core.optimizer.test_update import ADAMW, INFOS, MUON, draw, take_steps
from train.config import ParameterGroup
from train.errors import ConfigError
from train.optimizers.groups import group_members, group_of_parameters

HALF = ParameterGroup("vec*", learning_rate=0.5, weight_decay=0.2)
FROZEN = ParameterGroup("*", learning_rate=0.0)


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_a_group_scales_the_rate_and_replaces_the_decay(config):
    """A single step shows both, since the decay is a part of it."""
    params = draw(0)
    ((plain, _),) = take_steps(config, params, 1)
    ((grouped, _),) = take_steps(replace(config, groups=[HALF]), params, 1)
    for name in ("matrix", "table"):
        np.testing.assert_array_equal(grouped[name], plain[name])
    old_vector = params["vector"]
    decay = 0.01 * 0.5 * 0.2 * params["vector"]
    half_step = 0.5 * (plain["vector"] - old_vector) - decay
    np.testing.assert_allclose(grouped["vector"] - old_vector, half_step, atol=1e-7)


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_the_first_group_that_matches_a_parameter_has_it(config):
    keep = ParameterGroup("matrix")
    config = replace(config, groups=[keep, FROZEN])
    assert group_members(config, INFOS) == [["matrix"], ["table", "vector"]]
    params = draw(0)
    ((new, _),) = take_steps(config, params, 1)
    changed_names = {
        name for name in params if not np.array_equal(new[name], params[name])
    }
    assert changed_names == {"matrix"}


def test_a_group_without_parameters_is_a_mistake():
    config = replace(ADAMW, groups=[FROZEN, ParameterGroup("*norm*"), HALF])
    with pytest.raises(ConfigError) as error:
        group_of_parameters(config, INFOS)
    keys = [mistake.key for mistake in error.value.mistakes]
    assert keys == ["optimizer.groups[1].match", "optimizer.groups[2].match"]
