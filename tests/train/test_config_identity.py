"""The config sets the name of a run, and each change of it is classified."""

from dataclasses import fields, replace

from data.config import DataConfig
from model.choices import Attention
from model.config import ModelConfig
from train.config import (
    Config,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    Remat,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
)
from train.identity import (
    ALLOWED,
    HARMLESS,
    ChangeKind,
    config_differences,
    flatten,
    refused,
    run_dir,
    run_name,
)


def test_the_name_depends_on_what_makes_the_run():
    config = Config()
    name = run_name(config)
    assert name.startswith("gpt-python-")
    assert len(name.rpartition("-")[2]) == 8
    same_config = replace(
        config,
        train=TrainConfig(num_steps=5, remat=Remat.full, pipeline_microbatches=4),
        mesh=MeshConfig(data=8, pipeline=2),
        runtime=RuntimeConfig(cpu_devices=4),
        data=DataConfig(prefetch=9, cache_dir="x"),
        eval=EvalConfig(num_batches=1),
    )
    assert run_name(same_config) == name
    other_configs = [
        replace(config, seed=1),
        replace(config, optimizer=OptimizerConfig(learning_rate=2e-3)),
        replace(config, data=DataConfig(batch_size=8)),
        replace(config, model=ModelConfig(num_layers=5)),
        replace(config, schedule=ScheduleConfig(warmup_steps=7)),
    ]
    assert len({name, *map(run_name, other_configs)}) == len(other_configs) + 1
    assert run_dir(config) == f"runs/{name}"
    assert run_name(replace(config, run=RunConfig(name="me"))) == "me"
    named_config = replace(config, run=RunConfig(name="me", dir="gs://b/r"))
    assert run_dir(named_config) == "gs://b/r"


def test_differences_are_classified():
    new = Config(
        seed=1,
        model=ModelConfig(attention=Attention.xla, num_layers=9),
        data=DataConfig(cache_dir="x", batch_size=4),
        mesh=MeshConfig(fsdp=2, params={"embed": "fsdp"}),
        train=TrainConfig(num_steps=2000, pipeline_microbatches=4),
        eval=EvalConfig(interval_steps=7),
    )
    kinds = {diff.key: diff.kind for diff in config_differences(Config(), new)}
    assert kinds == {
        "seed": ChangeKind.refused,
        "model.num_layers": ChangeKind.refused,
        "model.attention": ChangeKind.allowed,
        "data.batch_size": ChangeKind.refused,
        "data.cache_dir": ChangeKind.harmless,
        "mesh.fsdp": ChangeKind.allowed,
        "mesh.params.embed": ChangeKind.allowed,
        "train.num_steps": ChangeKind.allowed,
        "train.pipeline_microbatches": ChangeKind.allowed,
        "eval.interval_steps": ChangeKind.harmless,
    }
    diffs = config_differences(Config(), new)
    assert {d.key for d in refused(diffs, ["seed", "model"])} == {"data.batch_size"}
    # A prefix is a whole section, not the start of a word.
    assert len(refused(diffs, ["mod", "data.batch"])) == 3
    assert str(diffs[0]) == "seed: 0 -> 1 (refused)"


def test_every_key_of_the_tables_exists():
    keys = [*flatten(Config()), *(f.name for f in fields(Config))]
    assert [key for key in (*ALLOWED, *HARMLESS) if key not in keys] == []


def test_document_start_is_true_by_default():
    """The default, null, means true. Without a document mask the key has no effect."""
    default = DataConfig()

    def differences(old: DataConfig, new: DataConfig) -> list[str]:
        return [
            str(diff) for diff in config_differences(Config(data=old), Config(data=new))
        ]

    with_start, without_start = (
        replace(default, document_start=x) for x in (True, False)
    )
    assert differences(default, with_start) == differences(with_start, default) == []
    difference = "data.document_start: true -> false (refused)"
    assert (
        differences(default, without_start)
        == differences(with_start, without_start)
        == [difference]
    )
    name = run_name(Config())
    assert name == "gpt-python-44136fa3"  # the name of a config without this key
    assert (
        run_name(Config(data=with_start))
        == name
        != run_name(Config(data=without_start))
    )
    unmasked = [replace(data, document_mask=False) for data in (default, without_start)]
    assert differences(*unmasked) == []
