"""Every mistake in a model config is named with its value."""

from dataclasses import asdict, replace
from operator import attrgetter

import pytest

from model.choices import (
    ComputeDtype,
    Dtype,
    Mlp,
    RopeScaling,
    Scaling,
    TokenShift,
)
from model.config import ModelConfig
from model.config_rules import model_mistakes
from model.mixer_catalog import MIXERS
from train.cli.schema import convert
from train.config import Config

MOE = {"mlp": Mlp.moe, "num_experts": 8}
LATENT_HYBRID = "gated_delta", "latent_attention"
SHIFT = {"token_shift": TokenShift.mlp}
INT8 = {"compute_dtype": ComputeDtype.int8}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"num_heads": 0, "embed_dim": -1}, ["num_heads", "embed_dim"]),
        ({"embed_dim": 130}, ["embed_dim"]),
        (SHIFT | {"embed_dim": 130, "num_heads": 2}, ["embed_dim"]),
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
        ({"high_precision_layers": ("first",)}, ["high_precision_layers"]),
        (INT8 | {"high_precision_layers": (4,)}, ["high_precision_layers"]),
        (
            INT8 | {"high_precision_layers": (0, 1, 2, "last")},
            ["high_precision_layers"],
        ),
        ({"window": 4, "layer_pattern": ()}, ["layer_pattern"]),
        ({"mixer_pattern": ()}, ["mixer_pattern"]),
        ({"mixer_pattern": ("attention", "latent_attention")}, ["mixer_pattern"]),
        ({"mixer_pattern": LATENT_HYBRID, "window": 4}, ["window"]),
        ({"delta_key_heads": 4, "delta_value_heads": 6}, ["delta_value_heads"]),
        (MOE | {"router_groups": 3}, ["router_groups"]),
        (MOE | {"router_groups": 8, "router_groups_kept": 2}, ["router_groups"]),
        (MOE | {"router_groups_kept": 2}, ["router_groups_kept"]),
        (MOE | {"router_groups": 4, "experts_per_token": 3}, ["router_groups_kept"]),
        (MOE | {"experts_per_token": 9}, ["experts_per_token"]),
    ],
)
def test_every_mistake_is_named_with_its_value(change, fields):
    config = replace(ModelConfig(), **change)
    _, bounds = convert({"model": asdict(config)}, Config)
    mistakes = bounds or model_mistakes(config, MIXERS)
    assert [mistake.key for mistake in mistakes] == [
        f"model.{field}" for field in fields
    ]
    for mistake in mistakes:
        assert mistake.value == attrgetter(mistake.key)(Config(model=config))
        assert len(mistake.rule) > 10
