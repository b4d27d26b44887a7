"""Recipes of `configs/experiment/`: each composes, keeps the rules, and has shapes."""

import jax
import pytest

from train.cli.command import compose
from train.cli.presets import CONFIG_DIR
from train.cli.rules import config_mistakes
from train.cli.unread_keys import without_effect
from train.program import make_program, settle

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
# Parameters and tokens a step, where the recipe's source tells them.
PUBLISHED = {
    "gpt2_124m": (124_439_808, 491_520),
    "gpt2_1558m": (1_557_611_200, 2**20),
    "llama3_1b": (1_235_814_400, 2**20),
    "llama3_8b": (8_030_261_248, 2**22),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_without_a_setting_that_nothing_reads(name: str):
    config = compose([f"experiment={name}", "data.path=x"])
    assert config_mistakes(config) == []
    assert without_effect(config) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_size(name: str):
    config = compose([f"experiment={name}", "data.path=x", "mesh.fsdp=-1"])
    program = make_program(settle(config, 512))
    count = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    model = program.config.model
    count -= (model.vocab_rows - (model.vocab_size or 0)) * model.embed_dim  # padding
    assert (count, program.tokens_per_step) == PUBLISHED[name]
