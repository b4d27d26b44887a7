"""Settings that nothing reads are named before anything runs."""

from dataclasses import replace
from typing import Any

import pytest

from model.choices import Activation, NormSpan, Position, RopeScaling, Scaling
from model.config import ModelConfig
from train.cli.unread_keys import without_effect
from train.config import (
    Config,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    OptimizerName,
    TrackerConfig,
    TrainConfig,
    WandbConfig,
)
from train.identity import config_differences


def _wandb(**values: Any) -> Config:
    return Config(tracker=TrackerConfig(wandb=WandbConfig(**values)))


def test_a_warm_up_without_an_end_is_named():
    (warning,) = without_effect(Config(train=TrainConfig(num_steps=100)))
    assert "schedule.warmup_steps=100" in warning


def test_a_setting_without_effect_is_named():
    adamw = OptimizerConfig(name=OptimizerName.adamw, muon_momentum=0.5)
    (warning,) = without_effect(Config(optimizer=adamw))
    assert "optimizer.muon_momentum" in warning
    assert "adamw" in warning
    assert (
        without_effect(Config(optimizer=replace(adamw, name=OptimizerName.muon))) == []
    )


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            {"rope_scaling": RopeScaling(factor=8.0, original_length=8192)},
            "model.rope_scaling.kind is none",
        ),
        (
            {
                "position": Position.learned,
                "rope_theta_local": 10.0,
                "rope_scaling": RopeScaling(Scaling.linear, 2.0),
                "rotary_fraction": 0.5,
            },
            "model.position is learned",
        ),
        ({"qk_norm_over": NormSpan.projection}, "model.qk_norm is false"),
        ({"swiglu_alpha": 2.0, "swiglu_limit": 3.0}, "model.activation is swiglu"),
    ],
)
def test_so_are_settings_of_what_a_model_does_not_have(model: dict, why: str):
    config = Config(model=ModelConfig(**model))
    changed = {diff.key for diff in config_differences(Config(), config)}
    assert set(without_effect(config)) == {
        f"{key} has no effect: {why}" for key in changed - {"model.position"}
    }


def test_so_is_how_to_judge_by_no_task():
    judge = EvalConfig(task_limit=5)
    (warning,) = without_effect(Config(eval=judge))
    assert warning.startswith("eval.task_limit has no effect")
    assert without_effect(Config(eval=replace(judge, tasks=["piqa"]))) == []


def test_so_is_a_schedule_without_stages():
    mesh, train = MeshConfig(pipeline_repeats=2), TrainConfig(pipeline_microbatches=8)
    found = without_effect(Config(mesh=mesh, train=train))
    assert [warning.split()[0] for warning in found] == [
        "mesh.pipeline_repeats",
        "train.pipeline_microbatches",
    ]
    assert without_effect(Config(mesh=replace(mesh, pipeline=2), train=train)) == []


def test_without_a_tracker_only_what_one_would_read_is_idle():
    assert without_effect(_wandb(enabled=True, project="mine")) == []
    (warning,) = without_effect(_wandb(project="mine"))
    why = "tracker.wandb.enabled is false"
    assert warning == f"tracker.wandb.project has no effect: {why}"


@pytest.mark.parametrize("key", ["remat", "offload"])
def test_to_keep_what_a_model_does_not_make_is_named(key):
    config = Config(train=TrainConfig(**{key: ("mlp_gate",)}))
    assert without_effect(config) == []
    plain = replace(config.model, activation=Activation.gelu)
    (warning,) = without_effect(replace(config, model=plain))
    assert f"{key}: mlp_gate has no effect, because model.activation=gelu" in warning
