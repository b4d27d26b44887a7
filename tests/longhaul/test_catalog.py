"""Added parts give keys, and a wrong record is reported in one sentence."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from annotated_types import Gt
from typing_extensions import Doc

from data.program import ROOT
from longhaul.api import compose
from longhaul.catalog import CATALOG, Catalog
from longhaul.kinds import (
    Format,
    LossKind,
    Metric,
    MixerKind,
    MLPKind,
    OptimizerKind,
    ScheduleKind,
)
from train.cli.schema import config_yaml, read_yaml
from train.config import Config
from train.errors import ConfigError
from train.identity import flatten, run_name
from train.recorded_parts import with_recorded_parts


@dataclass(frozen=True)
class Own:
    """Keys of a part."""

    size: Annotated[int, Gt(0), Doc("A size of the part.")] = 4


@dataclass(frozen=True)
class OwnMLP:
    """Keys of an MLP."""

    size: Annotated[int, Doc("Another size.")] = 4


@dataclass(frozen=True)
class Unhashable:
    """Values that cannot be hashed, which `dataclass` does not notice."""

    sizes: Annotated[Any, Doc("Sizes.")] = None

    def __hash__(self) -> int:
        raise TypeError("unhashable")


@dataclass
class NotFrozen:
    """A section that may change."""

    size: Annotated[int, Doc("A size.")] = 1


@dataclass(frozen=True)
class Undocumented:
    """A key without a sentence."""

    size: int = 1


def unused(*arguments: Any) -> Any:
    raise AssertionError("nothing calls a record before a program is made")


MIXER = MixerKind("own", unused, unused, unused, "", section=Own)
MLP_KIND = MLPKind("own_mlp", unused, section=OwnMLP)
LOSS = LossKind("own_loss", unused, section=Own)
OPTIMIZER = OptimizerKind("own_rule", unused, section=Own)
SCHEDULE = ScheduleKind("own_schedule", unused)
METRIC = Metric("own_metric", unused)
FORMAT = Format("own_format", "own files", unused, suffixes=(".own",))
ALL = (
    CATALOG.with_mixer(MIXER)
    .with_mlp(MLP_KIND)
    .with_loss(LOSS)
    .with_optimizer(OPTIMIZER)
    .with_schedule(SCHEDULE)
    .with_metric(METRIC)
    .with_format(FORMAT)
)


def test_the_keys_of_parts_are_checked_like_all_keys():
    config: Any = compose(
        [
            "model.mixer_pattern=[own,attention]",
            "model.parts.own.size=7",
            "model.mlp=own_mlp",
            "model.parts.own_mlp.size=2",
            "train.loss=own_loss",
            "train.parts.own_loss.size=3",
            "optimizer.name=own_rule",
            "schedule.name=own_schedule",
            "data=text",
            "data.path=x",
            "data.format=own_format",
        ],
        ALL,
    )
    assert config.model.part(Own).size == 7
    assert config.model.part(OwnMLP).size == 2
    assert config.train.parts.own_loss.size == 3
    with pytest.raises(ConfigError) as refusal:
        compose(["model.parts.own.size=0", "train.loss=mine", "optimizer.name=x"], ALL)
    keys = [mistake.key for mistake in refusal.value.mistakes]
    assert keys == ["model.parts.own.size", "train.loss", "optimizer.name"]
    text = str(refusal.value)
    assert "A size of the part." in text
    assert "own_rule" in text


def test_without_parts_nothing_changes():
    assert CATALOG.schema(Config) is Config
    assert compose(["seed=1"]) == compose(["seed=1"], CATALOG)
    with pytest.raises(ConfigError):
        compose(["train.loss=cross_entropy"])


def test_unused_parts_do_not_rename_a_run():
    assert run_name(compose(["seed=1"], ALL)) == run_name(compose(["seed=1"]))
    names = {
        run_name(compose([f"model.mixer={name}", *more], ALL))
        for name, more in (
            ("attention", []),
            ("own", []),
            ("own", ["model.parts.own.size=9"]),
        )
    }
    assert len(names) == 3


def test_a_recorded_config_can_be_read_without_its_parts(tmp_path):
    overrides = ["model.mixer_pattern=[own,attention]", "model.parts.own.size=7"]
    overrides += ["optimizer.name=own_rule", "train.loss=own_loss", "model.mlp=own_mlp"]
    overrides += ["schedule.name=own_schedule", "data.document_start=true"]
    overrides += ["data=text", "data.path=x", "data.format=own_format"]
    config = compose(overrides, ALL)
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    assert flatten(read_yaml(path)) == flatten(config)
    assert read_yaml(path, ALL.schema(Config)) == config
    with pytest.raises(ConfigError):
        read_yaml(path, Config)
    assert with_recorded_parts(Config, {"model": {"num_layers": 2}}) is Config


WRONG = [
    (CATALOG.with_mixer(LOSS), "must be a MixerKind"),  # type: ignore[arg-type]
    (CATALOG.with_loss(replace(LOSS, name="Own Loss")), "is no name"),
    (CATALOG.with_mixer(replace(MIXER, name="attention")), "is taken"),
    (CATALOG.with_optimizer(replace(OPTIMIZER, name="adamw")), "is taken"),
    (CATALOG.with_schedule(SCHEDULE).with_schedule(SCHEDULE), "is taken"),
    (CATALOG.with_metric(replace(METRIC, name="grad_norm")), "is taken"),
    (CATALOG.with_format(replace(FORMAT, name="csv")), "is taken"),
    (
        CATALOG.with_mixer(MIXER).with_mlp(replace(MLP_KIND, name="own")),
        "is the name of a mixer too",
    ),
    (
        CATALOG.with_mixer(MIXER).with_mixer(replace(MIXER, name="own_too")),
        "has the section of own",
    ),
    (CATALOG.with_loss(replace(LOSS, section=NotFrozen)), "frozen dataclass"),
    (CATALOG.with_loss(replace(LOSS, section=Undocumented)), "needs a sentence"),
    (CATALOG.with_loss(replace(LOSS, section=Unhashable)), "hashable"),
]


@pytest.mark.parametrize(("catalog", "rule"), WRONG, ids=[rule for _, rule in WRONG])
def test_a_wrong_record_is_one_mistake(catalog: Catalog, rule: str):
    (mistake,) = catalog.mistakes()
    assert rule in mistake.rule
    with pytest.raises(ConfigError, match=rule):
        compose([], catalog)


BROKEN = """
import longhaul
from dataclasses import dataclass
from flax import nnx
import jax.numpy as jnp
from longhaul.kinds import LossKind, MixerKind, MLPKind
from longhaul.layers import SelfAttention

class NoCache(nnx.Module):
    def __init__(self, config, rngs):
        pass
    def __call__(self, x, execution, call, cache, local_flag):
        return x, cache

class Narrow(SelfAttention):
    def __call__(self, x, *others):
        y, cache = super().__call__(x, *others)
        return y[..., :1], cache

class Failing(nnx.Module):
    def __init__(self, config, rngs):
        pass
    def __call__(self, x, execution, call):
        return x.nothing

@dataclass(frozen=True)
class ListLoss:
    sizes: list
    uses_mean_logit = False
    def sum(self, tokens, nats): return nats
    def factors(self, tokens): return None

def dims(model): return []
def flops(model, window, length): return 0

CATALOG = (
    longhaul.CATALOG.with_mixer(MixerKind("no_cache", NoCache, dims, flops, ""))
    .with_mixer(MixerKind("narrow", Narrow, dims, flops, ""))
    .with_mlp(MLPKind("failing", Failing))
    .with_loss(LossKind("listed", lambda values: ListLoss([1])))
    .with_loss(LossKind("none", lambda values: None))
)
if __name__ == "__main__":
    longhaul.main(CATALOG)
"""


def test_a_part_that_cannot_run_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    cases = (
        ("model.mixer=no_cache", "lacks the method empty_cache"),
        ("model.mixer=narrow", "returns an array of shape (1, 8, 1)"),
        ("model.mlp=failing", "cannot be run: AttributeError"),
        ("train.loss=listed", "cannot be hashed"),
        ("train.loss=none", "needs uses_mean_logit"),
    )
    overrides = [override for override, _ in cases if "mixer" not in override]
    first = [cases[0][0], overrides[0], overrides[1]]
    second = [cases[1][0], overrides[2]]
    said = ""
    for words in (first, second):
        result = subprocess.run(
            [sys.executable, "broken.py", "plan", *words, "runtime.cpu_devices=1"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 78, result.stderr
        assert "Traceback" not in result.stderr
        said += result.stderr
    for _, sentence in cases:
        assert sentence in said
