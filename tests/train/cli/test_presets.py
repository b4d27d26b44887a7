"""Presets keep the rules, and no default of a key changes the model of any of them.

preset_models.json holds the model of each preset, of the recipes and of benchmarks too.
After a change that is meant, renew it: GOLDEN=1 python -m pytest -n0 FILE.
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
OF_BENCHMARKS: dict[str, Sequence[str]] = {
    f"step {name}": step_overrides(**dataclasses.asdict(shape))
    for name, shape in PRESETS.items()
} | {row.name: row.overrides for table in TABLES.values() for row in read_rows(table)}
PLAIN = "model=plain"
STORED = Path(__file__).with_name("preset_models.json")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_without_a_setting_that_nothing_reads(name: str):
    config = compose([f"experiment={name}", "data.path=x"])
    assert config_mistakes(config) == []
    assert unread_key_warnings(config) == []


@functools.cache
def model_of(*overrides: str) -> dict[str, Any]:
    """Return the model that some overrides choose; others take no part in it."""
    keys = [key for key in overrides if key.startswith(("model", "experiment"))]
    return json.loads(json.dumps(dataclasses.asdict(compose(keys).model)))


def test_the_models_of_presets_are_those_that_are_stored():
    """The stored copy of a model lists what differs from the stored plain one."""
    found = {name: model_of(*overrides) for name, overrides in OF_BENCHMARKS.items()}
    found |= {choice: model_of(choice) for choice in CHOICES}
    plain = found.pop(PLAIN)
    if os.environ.get("GOLDEN"):
        differences = {
            name: {key: value for key, value in model.items() if value != plain[key]}
            for name, model in sorted(found.items())
        }
        STORED.write_text(json.dumps({PLAIN: plain} | differences, indent=1) + "\n")
    stored = json.loads(STORED.read_text())
    assert plain == stored.pop(PLAIN)
    assert found.keys() == stored.keys()
    for name, model in found.items():
        assert model == plain | stored[name], name


@pytest.mark.parametrize("choice", CHOICES)
def test_the_files_of_a_preset_state_every_key_of_the_model(choice: str):
    """Without the defaults of the dataclasses, they give the same model."""
    ConfigStore.instance().store(name="schema", node={})
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        tree = hydra.compose("train", [choice])
    assert OmegaConf.to_container(tree.model) == model_of(choice)
