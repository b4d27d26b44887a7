"""Choices by name: a member that no code was written for is never taken as another."""

import ast
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from model.block import Block
from model.choices import RopeScaling
from model.config import ModelConfig
from model.layers import activate, stds
from model.params import Kind, ParamInfo
from model.rope import frequencies
from train.config import OptimizerConfig, ScheduleConfig
from train.optimizer.moments import MomentStorage
from train.optimizer.schedule import make_schedule
from train.optimizer.update import make_optimizer

ROOT = Path(__file__).parents[2]
INFOS = {"w": ParamInfo(("embed", "mlp"), Kind.matrix, 1)}
ONES = jnp.ones((2, 2))


class Later(StrEnum):
    """A member that some choice gets one day."""

    new = "new"


def with_new(config, field: str):
    """Give a copy in which one choice is a member that nobody knows."""
    copy = replace(config)
    object.__setattr__(copy, field, Later.new)
    return copy


def model(field: str) -> ModelConfig:
    return with_new(ModelConfig(vocab_size=128, embed_dim=8, num_heads=2), field)


DOORS = {
    "activation": lambda: activate(model("activation"), ONES, ONES),
    "activation without a gate": lambda: activate(model("activation"), ONES, None),
    "init": lambda: stds(model("init"), 8),
    "norm placement": lambda: Block(model("norm_placement"), False, nnx.Rngs(0)),
    "rope scaling": lambda: frequencies(
        8, 1e4, with_new(RopeScaling(original_length=8), "kind")
    ),
    "schedule": lambda: make_schedule(with_new(ScheduleConfig(), "name"), 10),
    "optimizer": lambda: make_optimizer(
        with_new(OptimizerConfig(), "name"), ScheduleConfig(), 10, INFOS
    ),
    "moments": lambda: with_new(
        MomentStorage(OptimizerConfig().moment_dtype, INFOS, 0), "dtype"
    ).encode({"w": ONES}, jnp.int32(0)),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_new_member_of_a_choice_is_an_error_and_no_other_one(door):
    with pytest.raises(AssertionError):
        DOORS[door]()


def test_what_a_match_does_not_know_is_an_error():
    """`case _` calls `assert_never`, so that a type checker finds what is missing."""
    for package in ("model", "data", "train", "launch"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.match_case):
                    continue
                if ast.unparse(node.pattern) == "_" and node.guard is None:
                    body = "\n".join(map(ast.unparse, node.body))
                    assert body.startswith("assert_never("), f"{path}: {body}"
