"""What a config may be, and what is said of one that is wrong."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml

from data.config import DataConfig, MixtureSource, Source
from model.choices import Mlp, Position
from model.config import ModelConfig
from train.cli.hints import similar_names, unknown_key
from train.cli.presets import CONFIG_DIR
from train.cli.rules import config_mistakes, must_name_run
from train.cli.schema import convert
from train.cli.unread_keys import without_effect
from train.config import (
    Config,
    DcnConfig,
    EvalConfig,
    EvalSet,
    MeshConfig,
    MlflowConfig,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    RuntimeConfig,
    Schedule,
    ScheduleConfig,
    TraceConfig,
    TrackerConfig,
    TrainConfig,
    WandbConfig,
)
from train.errors import ConfigError, Mistake, nearest
from train.evaluate.__main__ import EvaluateConfig
from train.identity import flatten
from train.sample.__main__ import SampleConfig

MOE = ModelConfig(mlp=Mlp.moe)
RULES = yaml.safe_load((CONFIG_DIR / "mesh" / "rules.yaml").read_text())


def _wandb(**values: Any) -> Config:
    return Config(tracker=TrackerConfig(wandb=WandbConfig(**values)))


def mistakes(config: Config) -> list[Mistake]:
    """List mistakes between keys, rules that a mesh lacks being those of presets."""
    tables = {name: RULES[name] | getattr(config.mesh, name) for name in RULES}
    return config_mistakes(replace(config, mesh=replace(config.mesh, **tables)))


def keys(config: Any) -> list[str]:
    """List the keys of mistakes: by type and bounds, or else by rules between keys."""
    _, wrong = convert(asdict(config), type(config))
    between = mistakes if isinstance(config, Config) else must_name_run
    return [mistake.key for mistake in wrong or between(config)]


def test_the_defaults_are_right():
    assert mistakes(Config()) == []
    assert without_effect(Config()) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(runtime=RuntimeConfig(cpu_devices=0)), "runtime.cpu_devices"),
        (Config(model=ModelConfig(num_heads=3)), "model.embed_dim"),
        (Config(model=ModelConfig(rope_theta=1.0)), "model.rope_theta"),
        (Config(data=DataConfig(batch_size=0)), "data.batch_size"),
        (
            Config(data=DataConfig(sources={"a": MixtureSource("x", -1.0)})),
            "data.sources.a.weight",
        ),
        (
            Config(data=DataConfig(sources={"a": MixtureSource("x", 1.0, 0)})),
            "data.sources.a.epochs",
        ),
        (Config(optimizer=OptimizerConfig(b2=1.0)), "optimizer.b2"),
        (
            Config(optimizer=OptimizerConfig(learning_rate=float("nan"))),
            "optimizer.learning_rate",
        ),
        (Config(train=TrainConfig(accumulation_steps=3)), "data.batch_size"),
        (Config(train=TrainConfig(accumulation_steps=0)), "train.accumulation_steps"),
        (
            Config(schedule=ScheduleConfig(name=Schedule.wsd, decay_steps=1501)),
            "schedule.decay_steps",
        ),
        (Config(eval=EvalConfig(num_batches=0)), "eval.num_batches"),
        (_wandb(mode="on"), "tracker.wandb.mode"),
        (
            Config(
                run=RunConfig(dir="s3://bucket/run"),
                tracker=TrackerConfig(mlflow=MlflowConfig(enabled=True)),
            ),
            "tracker.mlflow.uri",
        ),
        (Config(eval=EvalConfig(sets={"a b": EvalSet("x")})), "eval.sets.a b"),
        (Config(eval=EvalConfig(sets={"loss": EvalSet("x")})), "eval.sets.loss"),
        (Config(eval=EvalConfig(sets={"a": EvalSet()})), "eval.sets.a.path"),
        (
            Config(
                data=DataConfig(
                    source=Source.mixture, sources={"a": MixtureSource("x")}
                ),
                eval=EvalConfig(sets={"a": EvalSet("y")}),
            ),
            "eval.sets.a",
        ),
        (Config(profile=TraceConfig(steps=[4, 4])), "profile.steps"),
        (Config(profile=TraceConfig(steps=[4])), "profile.steps"),
        (
            Config(mesh=MeshConfig(context=2, activations={"seq": None})),
            "mesh.activations.seq",
        ),
        (Config(profile=TraceConfig(steps=[0, 4])), "profile.steps"),
        (Config(mesh=MeshConfig(expert=-1)), "mesh.expert"),
        (Config(mesh=MeshConfig(params={"layers": "data"})), "mesh.params.layers"),
        (
            Config(mesh=MeshConfig(pipeline=2, params={"layers": None})),
            "mesh.pipeline",
        ),
        (
            Config(mesh=MeshConfig(activations={"mlp": ["tensor", "fsdp"]})),
            "mesh.activations.mlp",
        ),
        (
            Config(model=MOE, mesh=MeshConfig(params={"experts": "tensor"})),
            "mesh.params.experts",
        ),
        (Config(model=replace(MOE, dense_layers=4)), "model.dense_layers"),
        (Config(model=replace(MOE, experts_every=3)), "model.experts_every"),
        (Config(model=replace(MOE, experts_per_token=9)), "model.experts_per_token"),
        (Config(mesh=MeshConfig(data=-1, fsdp=-1)), "mesh.fsdp"),
        (Config(mesh=MeshConfig(tensor=0)), "mesh.tensor"),
        (Config(mesh=MeshConfig(data=4, dcn=DcnConfig(data=3))), "mesh.dcn.data"),
        (Config(mesh=MeshConfig(data=-1, dcn=DcnConfig(data=0))), "mesh.dcn.data"),
        (
            Config(mesh=MeshConfig(params={"embedding": "fsdp"})),
            "mesh.params.embedding",
        ),
        (Config(mesh=MeshConfig(params={"embed": "embed"})), "mesh.params.embed"),
        (
            Config(mesh=MeshConfig(activations={"batch": ["data", "data"]})),
            "mesh.activations.batch",
        ),
        (EvaluateConfig(run=RunConfig(dir="r"), batch_size=0), "batch_size"),
        (SampleConfig(run=RunConfig(dir="r"), top_p=0.0), "top_p"),
        (SampleConfig(), "run.dir"),
    ],
)
def test_each_rule_names_its_key(config: Any, key: str):
    assert keys(config) == [key]


def test_what_is_allowed_at_the_edge():
    mesh = MeshConfig(data=4, fsdp=-1, dcn=DcnConfig(data=2, fsdp=3))
    mesh = replace(mesh, params={"embed": ["fsdp", "tensor"], "layers": None})
    steps = TraceConfig(steps=[1, 2])
    schedule = ScheduleConfig(name=Schedule.wsd, warmup_steps=9, decay_steps=1)
    train = TrainConfig(num_steps=10)
    assert (
        mistakes(Config(mesh=mesh, profile=steps, schedule=schedule, train=train)) == []
    )


def test_a_mesh_without_rules_is_told_each():
    names = [*RULES["params"], *RULES["activations"]]
    assert sorted(m.key.split(".")[2] for m in config_mistakes(Config())) == sorted(
        names
    )


def test_learned_positions_bound_the_rows():
    model = ModelConfig(position=Position.learned, max_sequence_length=128)
    assert keys(Config(model=model)) == ["data.sequence_length"]
    assert keys(Config(model=replace(model, position=Position.rotary))) == []
    assert keys(Config(model=replace(model, max_sequence_length=256))) == []


def test_the_error_shows_key_value_and_rule():
    text = str(ConfigError([Mistake("a.b", None, "must be 1"), Mistake("c", 2, "no")]))
    assert text.splitlines()[0].startswith("2 mistakes")
    assert "a.b = null\n      must be 1" in text
    assert "c = 2\n      no" in text


def test_what_cannot_wait_in_host_memory_is_refused():
    kept = TrainConfig(remat=("query",), offload=("residual", "query"))
    assert [m.key for m in mistakes(Config(train=kept))] == ["train.offload"]
    config = Config(train=TrainConfig(offload=("residual",)))
    config = replace(config, mesh=replace(config.mesh, pipeline=2))
    rules = [m.rule for m in mistakes(config) if m.key == "train.offload"]
    assert ["train.remat" in rule for rule in rules] == [True, True]
    muon = OptimizerConfig(name=OptimizerName.muon, offload=True)
    (mistake,) = mistakes(Config(optimizer=muon))
    assert "use optimizer=adamw" in mistake.rule


def test_a_rank_file_needs_its_hash():
    ((field, value, rule),) = DataConfig(tokenizer="mine.tiktoken").mistakes()
    assert (field, value) == ("tokenizer_sha256", None)
    assert "sha256sum mine.tiktoken" in rule


def test_a_store_brings_its_own_tokenizer_and_split():
    store = DataConfig(source=Source.tokens, path="x", tokenizer="gpt2")
    (warning,) = without_effect(Config(data=store))
    assert warning == "data.tokenizer has no effect: data.source is tokens"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optimizer.learing_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("mode1.num_heads", "model.num_heads"),
    ],
)
def test_did_you_mean(word: str, meant: str):
    names = flatten(Config())
    assert meant in similar_names(word, names)
    assert similar_names("mesh.params.xyz", names) == []


def test_an_unknown_key_without_a_like_shows_where_keys_are_listed():
    assert "--cfg job" in unknown_key(Config, "xyz").rule
    assert "--cfg job" in unknown_key(Config, "xyz.abc").rule
    rule = unknown_key(Config, "log.xyz.abc").rule
    assert "; log has interval_steps, " in rule


@pytest.mark.parametrize(
    ("value", "step", "said"), [(10, 8, "8 or 16"), (3, 8, "8"), (23, 12, "12 or 24")]
)
def test_the_nearest_multiples_are_named(value: int, step: int, said: str):
    assert nearest(value, step) == f"nearest: {said}"
    data, train = DataConfig(batch_size=value), TrainConfig(accumulation_steps=step)
    (mistake,) = mistakes(Config(data=data, train=train))
    assert mistake.rule.endswith(f"nearest: {said}")
