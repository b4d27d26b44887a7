"""A config that breaks a rule is refused, and the error names the key and the rule."""

from typing import Any

import pytest
import yaml

from data.config import DataConfig
from data.config_rules import data_mistakes
from data.errors import Mistake
from train.cli.hints import similar_names, unknown_key
from train.cli.presets import CONFIG_DIR
from train.cli.rules import config_mistakes, must_name_run
from train.cli.schema import config_yaml, convert, read_yaml
from train.cli.unread_keys import unread_key_warnings
from train.config import Config, OptimizerName
from train.errors import ConfigError, exit_code, nearest
from train.evaluate.__main__ import EvaluateConfig
from train.identity import flatten, run_name
from train.sample.__main__ import SampleConfig

RULES = yaml.safe_load((CONFIG_DIR / "mesh" / "rules.yaml").read_text())


def mistakes(text: str, schema: type = Config) -> list[Mistake]:
    """List the mistakes of type and bounds; if there are none, those between keys.

    Sharding rules that the mesh lacks are taken from the presets.
    """
    values: dict[str, Any] = yaml.safe_load(text) or {}
    if schema is Config:
        mesh = values.setdefault("mesh", {})
        mesh |= {name: RULES[name] | mesh.get(name, {}) for name in RULES}
    config, errors = convert(values, schema)
    return errors or (config_mistakes if schema is Config else must_name_run)(config)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("runtime: {cpu_devices: 0}", "runtime.cpu_devices"),
        ("model: {num_heads: 3}", "model.embed_dim"),
        ("model: {rope_theta: 1.0}", "model.rope_theta"),
        ("model: {mlp: moe, dense_layers: 4}", "model.dense_layers"),
        ("model: {mlp: moe, experts_every: 3}", "model.experts_every"),
        ("model: {mlp: moe, experts_per_token: 9}", "model.experts_per_token"),
        (
            "model: {position: learned, max_sequence_length: 128}",
            "data.sequence_length",
        ),
        ("data: {batch_size: 0}", "data.batch_size"),
        ("data: {sources: {a: {path: x, weight: -1.0}}}", "data.sources.a.weight"),
        ("data: {sources: {a: {path: x, epochs: 0}}}", "data.sources.a.epochs"),
        ("optimizer: {b2: 1.0}", "optimizer.b2"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate"),
        ("optimizer: {name: muon, offload: true}", "optimizer.offload"),
        ("train: {accumulation_steps: 3}", "data.batch_size"),
        ("train: {accumulation_steps: 0}", "train.accumulation_steps"),
        ("train: {remat: [query], offload: [residual, query]}", "train.offload"),
        ("schedule: {name: wsd, decay_steps: 1501}", "schedule.decay_steps"),
        ("schedule: {earlier_decays: [300, 200]}", "schedule.earlier_decays"),
        ("schedule: {name: piecewise}", "schedule.points"),
        ("schedule: {name: piecewise, points: [{factor: 1}]}", "schedule.points[0]"),
        ("eval: {num_batches: 0}", "eval.num_batches"),
        ("eval: {sets: {a b: {path: x}}}", "eval.sets.a b"),
        ("eval: {sets: {loss: {path: x}}}", "eval.sets.loss"),
        ("eval: {sets: {a: {}}}", "eval.sets.a.path"),
        (
            "{data: {source: mixture, sources: {a: {path: x}}}, "
            "eval: {sets: {a: {path: y}}}}",
            "eval.sets.a",
        ),
        ("tracker: {wandb: {mode: strange}}", "tracker.wandb.mode"),
        (
            "{run: {dir: s3://bucket/run}, tracker: {mlflow: {enabled: true}}}",
            "tracker.mlflow.uri",
        ),
        ("profile: {steps: [4, 4]}", "profile.steps"),
        ("profile: {steps: [4]}", "profile.steps"),
        ("profile: {steps: [0, 4]}", "profile.steps"),
        ("mesh: {context: 2, activations: {seq: null}}", "mesh.activations.seq"),
        ("mesh: {expert: -1}", "mesh.expert"),
        ("mesh: {params: {layers: data}}", "mesh.params.layers"),
        ("mesh: {pipeline: 2, params: {layers: null}}", "mesh.pipeline"),
        ("mesh: {activations: {mlp: [tensor, fsdp]}}", "mesh.activations.mlp"),
        (
            "{model: {mlp: moe}, mesh: {params: {experts: tensor}}}",
            "mesh.params.experts",
        ),
        ("mesh: {data: -1, fsdp: -1}", "mesh.fsdp"),
        ("mesh: {tensor: 0}", "mesh.tensor"),
        ("mesh: {data: 4, dcn: {data: 3}}", "mesh.dcn.data"),
        ("mesh: {params: {embedding: fsdp}}", "mesh.params.embedding"),
        ("mesh: {params: {embed: embed}}", "mesh.params.embed"),
        ("mesh: {activations: {batch: [data, data]}}", "mesh.activations.batch"),
    ],
)
def test_each_rule_names_its_key(text: str, key: str):
    assert [mistake.key for mistake in mistakes(text)] == [key]


@pytest.mark.parametrize(
    ("schema", "text", "key"),
    [
        (EvaluateConfig, "{run: {dir: r}, batch_size: 0}", "batch_size"),
        (SampleConfig, "{run: {dir: r}, top_p: 0.0}", "top_p"),
        (SampleConfig, "", "run.dir"),
    ],
)
def test_each_rule_of_commands_on_a_run_names_its_key(
    schema: type, text: str, key: str
):
    assert [mistake.key for mistake in mistakes(text, schema)] == [key]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mesh: {data: 4, fsdp: -1, dcn: {data: 2, fsdp: 3}, params: "
        "{embed: [fsdp, tensor], layers: null}}",
        "profile: {steps: [1, 2]}",
        "{train: {num_steps: 10}, schedule: "
        "{name: wsd, warmup_steps: 9, decay_steps: 1}}",
        "model: {position: learned, max_sequence_length: 256}",
    ],
)
def test_values_at_the_limits_are_allowed(text: str):
    assert mistakes(text) == []


def test_a_mesh_without_rules_is_told_each_rule():
    names = [*RULES["params"], *RULES["activations"]]
    assert sorted(m.key.split(".")[2] for m in config_mistakes(Config())) == sorted(
        names
    )


def test_the_error_shows_key_value_and_rule():
    text = str(ConfigError([Mistake("a.b", None, "must be 1"), Mistake("c", 2, "no")]))
    assert text.splitlines()[0].startswith("2 mistakes")
    assert "a.b = null\n      must be 1" in text
    assert "c = 2\n      no" in text


def test_a_rank_file_needs_its_hash():
    (mistake,) = data_mistakes(DataConfig(tokenizer="mine.tiktoken"))
    assert (mistake.key, mistake.value) == ("data.tokenizer_sha256", None)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optimizer.learing_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("mode1.num_heads", "model.num_heads"),
    ],
)
def test_a_similar_key_is_suggested(word: str, meant: str):
    names = flatten(Config())
    assert meant in similar_names(word, names)
    assert similar_names("mesh.params.xyz", names) == []


def test_an_unknown_key_without_a_similar_one_shows_where_keys_are_listed():
    assert "--cfg job" in unknown_key(Config, "xyz.abc").rule
    assert "; log has interval_steps, " in unknown_key(Config, "log.xyz.abc").rule


@pytest.mark.parametrize(
    ("value", "step", "said"), [(10, 8, "8 or 16"), (3, 8, "8"), (23, 12, "12 or 24")]
)
def test_the_nearest_multiples_are_named(value: int, step: int, said: str):
    assert nearest(value, step) == f"nearest: {said}"


def test_a_config_that_is_written_and_read_is_the_same(tmp_path):
    config, invalid_fields = convert(
        {
            **{"seed": 3, "run": {"allow_change": ["data"]}},
            "mesh": {"fsdp": -1, "params": {"embed": "fsdp", "layers": None}},
            "optimizer": {"name": "muon", "learning_rate": 1e-5},
            "profile": {"steps": [1, 2]},
        },
        Config,
    )
    assert invalid_fields == []
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    config_of_file = read_yaml(path)
    assert config_of_file == config
    assert type(config_of_file.optimizer.name) is OptimizerName
    assert run_name(config_of_file) == run_name(config)


def test_a_bad_config_file_names_every_bad_key(tmp_path):
    path = tmp_path / "config.yaml"
    data = "data: {document_start: true}\n"
    path.write_text(f"seed: x\nmodel: {{num_heads: 3, layers: 4}}\nold: 1\n{data}")
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert [m.key for m in error.value.mistakes] == ["seed", "model.layers", "old"]
    assert str(path) in str(error.value)
    path.write_text(f"seed: 4\n{data}")  # Missing keys have their defaults.
    assert read_yaml(path) == Config(seed=4, data=DataConfig(document_start=True))
    with pytest.raises(ConfigError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["seed: 4\n", "data:\n", "data: {skip_steps: []}\n"])
def test_the_config_of_a_run_that_another_version_began_is_refused(tmp_path, text):
    """The one mistake is the missing key; unknown keys are not listed as well."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    (mistake,) = error.value.mistakes
    assert mistake.key == str(path)
    assert "lacks data.document_start" in mistake.rule
    assert "start another run.name" in mistake.rule
    assert exit_code(error.value) == 78


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", []),
        ("train: {num_steps: 100}", ["schedule.warmup_steps=100"]),
        (
            "optimizer: {name: adamw, muon_momentum: 0.5}",
            ["optimizer.muon_momentum has no effect: optimizer.name is adamw"],
        ),
        ("optimizer: {name: muon, muon_momentum: 0.5}", []),
        (
            "model: {rope_scaling: {factor: 8.0, original_length: 8192}}",
            [
                f"model.rope_scaling.{key} has no effect: model.rope_scaling.kind is "
                "none"
                for key in ("factor", "original_length")
            ],
        ),
        (
            "model: {position: learned, rope_theta_local: 10.0, rotary_fraction: 0.5}",
            [
                f"model.{key} has no effect: model.position is learned"
                for key in ("rope_theta_local", "rotary_fraction")
            ],
        ),
        ("model: {qk_norm_over: projection}", ["model.qk_norm is false"]),
        ("model: {swiglu_alpha: 2.0}", ["model.activation is swiglu"]),
        (
            "data: {source: tokens, path: x, tokenizer: gpt2}",
            ["data.tokenizer has no effect: data.source is tokens"],
        ),
        ("model: {delta_key_dim: 8}", ["delta_key_dim has no effect: no layer is"]),
        ("model: {mixer_pattern: [attention, gated_delta], window: 8}", []),
        (
            "model: {mixer: gated_delta, window: 8, attention_gate: true}",
            [
                f"model.{key} has no effect: all layers are gated_delta"
                for key in ("attention_gate", "window")
            ],
        ),
        (
            "model: {mixer: gated_delta, mixer_pattern: [attention]}",
            ["model.mixer has no effect: model.mixer_pattern is set"],
        ),
        ("eval: {task_limit: 5.0}", ["eval.task_limit has no effect"]),
        ("eval: {task_limit: 5.0, tasks: [piqa]}", []),
        ("mesh: {pipeline_repeats: 2}", ["mesh.pipeline_repeats"]),
        ("mesh: {pipeline_repeats: 2, pipeline: 2}", []),
        ("train: {pipeline_microbatches: 8}", ["train.pipeline_microbatches"]),
        ("tracker: {wandb: {enabled: true, project: mine}}", []),
        ("tracker: {wandb: {project: mine}}", ["tracker.wandb.enabled is false"]),
        ("train: {remat: [mlp_gate]}", []),
        (
            "{model: {activation: gelu}, train: {remat: [mlp_gate]}}",
            ["remat: mlp_gate has no effect, because model.activation=gelu"],
        ),
        (
            "{model: {activation: gelu}, train: {offload: [mlp_gate]}}",
            ["offload: mlp_gate has no effect, because model.activation=gelu"],
        ),
    ],
)
def test_a_setting_without_effect_is_named(text: str, said: list[str]):
    config, _ = convert(yaml.safe_load(text) or {}, Config)
    warnings = sorted(unread_key_warnings(config))
    assert len(warnings) == len(said), warnings
    for warning, part in zip(warnings, said, strict=True):
        assert part in warning
