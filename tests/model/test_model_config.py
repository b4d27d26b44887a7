"""What a model may be."""

from dataclasses import asdict, replace
from operator import attrgetter

import pytest

from model.choices import Dtype, Position, RopeScaling, Scaling
from model.config import ModelConfig
from model.config_rules import broken_rules
from train.cli.schema import convert


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"num_heads": 0, "embed_dim": -1}, ["num_heads", "embed_dim"]),
        ({"embed_dim": 130}, ["embed_dim"]),
        ({"num_kv_heads": 3}, ["num_kv_heads"]),
        ({"num_kv_heads": 8}, ["num_kv_heads"]),
        ({"rotary_fraction": 0.05}, ["rotary_fraction"]),
        ({"layer_unroll": -2}, ["layer_unroll"]),
        ({"param_dtype": Dtype.auto}, ["param_dtype"]),
        ({"layer_pattern": ("local", "global")}, ["window"]),
        ({"rope_theta_local": 100.0}, ["rope_theta_local"]),
        ({"rope_scaling": RopeScaling(factor=0.5)}, ["rope_scaling.factor"]),
        (
            {"rope_scaling": RopeScaling(Scaling.yarn, 8.0)},
            ["rope_scaling.original_length"],
        ),
        (
            {"rope_scaling": RopeScaling(Scaling.llama3, 8.0, 8192, slow_turns=4.0)},
            ["rope_scaling.slow_turns"],
        ),
        ({"window": 4, "layer_pattern": ("local",)}, ["layer_pattern"]),
        ({"window": 4, "layer_pattern": ()}, ["layer_pattern"]),
    ],
)
def test_every_mistake_is_named_with_its_value(change, fields):
    config = replace(ModelConfig(), **change)
    _, bounds = convert(asdict(config), ModelConfig)
    found = bounds or broken_rules(config)
    assert [mistake[0] for mistake in found] == fields
    for field, value, rule, _ in found:
        assert value == attrgetter(field)(config)
        assert len(rule) > 10


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"embed_dim": 130, "head_dim": 32},
        {"num_kv_heads": 1},
        {"rotary_fraction": 0.05, "position": Position.learned},
        {"logit_soft_cap": 30.0, "layer_unroll": -1, "param_dtype": Dtype.bfloat16},
    ],
)
def test_what_is_right_has_no_mistakes(change):
    assert broken_rules(replace(ModelConfig(), **change)) == []


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None,) * 4),
        ({"window": 8}, (8,) * 4),
        (
            {"window": 8, "layer_pattern": ("local", "local", "global")},
            (8, 8, None, 8),
        ),
        ({"window": 8, "layer_pattern": ("global", "local")}, (None, 8, None, 8)),
    ],
)
def test_a_pattern_is_repeated_over_the_depth(change, windows):
    assert replace(ModelConfig(), **change).windows == windows


@pytest.mark.parametrize(("fraction", "dim"), [(1.0, 12), (0.5, 6), (0.6, 6), (0.3, 2)])
def test_the_rotated_dims_are_even(fraction, dim):
    config = ModelConfig(num_heads=8, embed_dim=96, rotary_fraction=fraction)
    assert config.rotary_dim == dim
