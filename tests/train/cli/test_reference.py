"""docs/config.md holds every key. After a change: GOLDEN=1 pytest <this file>."""

import os
from dataclasses import fields, is_dataclass

from data.config import PrepareConfig
from data.inspect import InspectConfig
from data.train_tokenizer import TrainTokenizerConfig
from data.verify import VerifyConfig
from launch.config import KINDS, LaunchConfig
from tests.fleet import REPOSITORY
from train.checkpoints import CheckpointsConfig
from train.cli.hints import keys_of, type_of
from train.cli.reference import meaning, tables
from train.config import Config
from train.evaluate import EvaluateConfig
from train.plan.config import PlanConfig
from train.sample import SampleConfig
from train.status import StatusConfig

PAGE = REPOSITORY / "docs" / "config.md"
INTRODUCTION = """\
# Every key

Made from the dataclasses; what a preset sets instead of a default stands in
`configs/`, and `python -m train --cfg job` shows the outcome. `null` is nothing given.
Commands on a run (`train.evaluate` and the like) take `run.*` too, some also
`runtime.*`."""


def page() -> str:
    shared = {field.name for field in fields(Config)}
    parts = [INTRODUCTION, "## python -m train", *tables(Config)]
    commands = {
        "train.plan": PlanConfig,
        "train.evaluate": EvaluateConfig,
        "train.sample": SampleConfig,
        "train.status": StatusConfig,
        "train.checkpoints": CheckpointsConfig,
        "data.prepare": PrepareConfig,
        "data.inspect": InspectConfig,
        "data.verify": VerifyConfig,
        "data.train_tokenizer": TrainTokenizerConfig,
    }
    for command, schema in commands.items():
        own = shared if issubclass(schema, Config) else {"run", "runtime"}
        parts += [f"## python -m {command}", *tables(schema, leave_out=own)]
    own = {*shared, "cluster"}
    parts += ["## python -m launch", *tables(LaunchConfig, leave_out=own)]
    for kind, schema in KINDS.items():
        parts += tables(schema, "cluster.", f"cluster={kind}")
    return "\n\n".join(parts) + "\n"


def test_the_page_holds_every_key():
    if os.environ.get("GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "write it anew: GOLDEN=1 pytest this file"


def test_each_key_says_what_it_means():
    sections = [key for key in keys_of(Config) if is_dataclass(type_of(Config, key)[0])]
    leaves = set(keys_of(Config)) - {*sections}
    assert [key for key in sorted(leaves) if not meaning(Config, key)] == []


def test_comments_above_and_beside_a_field_count():
    assert meaning(Config, "train.num_steps").startswith("Updates of the whole run")
    assert meaning(Config, "train.skip_sigma").endswith("the recent ones; null: none")
    assert meaning(PlanConfig, "seed") == meaning(Config, "seed") != ""
    assert meaning(Config, "no.such.key") == ""
