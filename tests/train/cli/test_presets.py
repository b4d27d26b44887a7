"""Recipes of `configs/experiment/`: each composes and keeps the rules."""

import pytest

from train.cli.command import compose
from train.cli.presets import CONFIG_DIR
from train.cli.rules import config_mistakes
from train.cli.unread_keys import unread_key_warnings

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_without_a_setting_that_nothing_reads(name: str):
    config = compose([f"experiment={name}", "data.path=x"])
    assert config_mistakes(config) == []
    assert unread_key_warnings(config) == []
