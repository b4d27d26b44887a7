"""A config as a file: written, read back, and read as older versions wrote it."""

from dataclasses import replace

import pytest

from train.cli.schema import config_yaml, read_yaml
from train.config import (
    Config,
    MeshConfig,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    TraceConfig,
    WandbConfig,
)
from train.errors import ConfigError
from train.identity import run_name


def test_yaml_round_trip(tmp_path):
    config = Config(
        seed=3,
        run=RunConfig(allow_change=["data"]),
        mesh=MeshConfig(fsdp=-1, params={"embed": "fsdp", "layers": None}),
        optimizer=OptimizerConfig(name=OptimizerName.muon, learning_rate=1e-5),
        profile=TraceConfig(steps=[1, 2]),
    )
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    back = read_yaml(path)
    assert back == config
    assert type(back.optimizer.name) is OptimizerName
    assert run_name(back) == run_name(config)


def test_a_bad_config_file_names_every_bad_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("seed: x\nmodel: {num_heads: 3, layers: 4}\nold: 1\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert [m.key for m in caught.value.mistakes] == ["seed", "model.layers", "old"]
    assert str(path) in str(caught.value)
    path.write_text("seed: 4\n")
    assert read_yaml(path) == Config(seed=4)  # what it lacks has its default
    with pytest.raises(ConfigError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")


def test_the_tracker_of_an_older_version_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    for name in ("wandb", "none"):
        old = f"tracker: {{name: {name}, project: mine, mode: online}}\n"
        file.write_text(old)
        changes = {"tracker.wandb.project": "ours"}
        read = read_yaml(file).tracker, read_yaml(file, changes=changes).tracker
        wandb = WandbConfig(name == "wandb", "mine", "online")
        assert [tracker.wandb for tracker in read] == [
            wandb,
            replace(wandb, project="ours"),
        ]
