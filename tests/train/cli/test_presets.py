"""Presets keep the rules, and no default of a key changes the model of any of them.

preset_models.json holds the models of all presets, recipes and benchmarks. After an
intended change, renew it: GOLDEN=1 python -m pytest -n0 FILE.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from benchmarks.longhaul import step_overrides
from benchmarks.published_rows import TABLES, read_rows
from benchmarks.step_worker import PRESETS
from train.cli.command import compose
from train.cli.presets import CONFIG_DIR, VERSION_BASE
from train.cli.rules import config_mistakes
from train.cli.unread_keys import unread_key_warnings

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
MODELS = [name for name in MODELS if name != "gpt_nano"]  # The default may change.
CHOICES = [
    *(f"model={name}" for name in MODELS),
    *(f"experiment={name}" for name in RECIPES),
]
BENCHMARK_OVERRIDES: dict[str, Sequence[str]] = {
    f"step {name}": step_overrides(shape) for name, shape in PRESETS.items()
} | {row.name: row.overrides for table in TABLES.values() for row in read_rows(table)}
PLAIN = "model=plain"
STORED = Path(__file__).with_name("preset_models.json")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_without_unread_settings(name: str):
    config = compose([f"experiment={name}", "data.path=x"])
    assert config_mistakes(config) == []
    assert unread_key_warnings(config) == []


@functools.cache
def model_of(*overrides: str) -> dict[str, Any]:
    """Return the model that the overrides of `model` and `experiment` choose."""
    keys = [key for key in overrides if key.startswith(("model", "experiment"))]
    return json.loads(json.dumps(dataclasses.asdict(compose(keys).model)))


def test_the_models_of_presets_equal_the_stored_ones():
    """The stored copy of a model lists its differences from the stored plain one."""
    models = {
        name: model_of(*overrides) for name, overrides in BENCHMARK_OVERRIDES.items()
    }
    models |= {choice: model_of(choice) for choice in CHOICES}
    plain_model = models.pop(PLAIN)
    if os.environ.get("GOLDEN"):
        differences = {
            name: {
                key: value for key, value in model.items() if value != plain_model[key]
            }
            for name, model in sorted(models.items())
        }
        STORED.write_text(
            json.dumps({PLAIN: plain_model} | differences, indent=1) + "\n"
        )
    stored_models = json.loads(STORED.read_text())
    assert plain_model == stored_models.pop(PLAIN)
    assert models.keys() == stored_models.keys()
    for name, model in models.items():
        assert model == plain_model | stored_models[name], name


@pytest.mark.parametrize("choice", CHOICES)
def test_the_files_of_a_preset_state_every_key_of_the_model(choice: str):
    """Without the defaults of the dataclasses, they give the same model."""
    ConfigStore.instance().store(name="schema", node={})
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        tree = hydra.compose("train", [choice])
    assert OmegaConf.to_container(tree.model) == model_of(choice)
