"""A shrunk config is small and valid, and keeps the switches of the run."""

import math

import jax
import pytest

from data.program import FOLDER
from model.config import ModelConfig
from train.identity import flatten
from train.prove.divided_step import DividedStep, mesh_of
from train.prove.parity import Reference
from train.prove.shrink import shrink, small_sizes
from train.resolve.program import make_program, settle

MODELS = sorted(path.stem for path in (FOLDER / "configs/model").glob("*.yaml"))
MESH = ("mesh.fsdp=32", "mesh.data=2")
SMALLER = {
    *small_sizes(ModelConfig()),
    *("model.num_layers", "model.dense_layers", "model.num_heads", "model.head_dim"),
    *("model.num_kv_heads", "model.num_experts", "model.experts_per_token"),
    *("model.vocab_size", "model.max_sequence_length", "model.window"),
    *("data.sequence_length", "data.batch_size", "train.loss_chunk_tokens"),
    *("train.accumulation_steps", "train.pipeline_microbatches"),
    *("mesh.fsdp", "mesh.tensor", "mesh.data", "mesh.context", "mesh.pipeline"),
    *("mesh.expert", "mesh.pipeline_repeats"),
}
OTHERS = {"model.compute_dtype", "model.param_dtype", "schedule.warmup_steps"}


@pytest.fixture
def shrunk(composed):
    def shrunk(overrides):
        config = composed(overrides)
        vocab = config.model.vocab_size or 50304
        return shrink(settle(config, vocab), jax.devices()[0])

    return shrunk


@pytest.mark.parametrize("model", MODELS)
def test_any_model_becomes_small_and_keeps_its_switches(shrunk, model):
    result = shrunk(
        [f"model={model}", *MESH, "data.batch_size=64", "data.sequence_length=4096"]
    )
    config = result.config
    changes = result.changes
    assert changes.keys() <= SMALLER | OTHERS
    for key in changes.keys() & SMALLER:
        old, new = changes[key]
        assert old is None or new < old
    assert config.model.num_layers <= 12
    assert config.model.embed_dim * config.model.vocab_size <= 32 * 160
    assert mesh_of(config.mesh) == {"data": 2, "fsdp": 2}
    assert len(result.left_out) == 1


def test_the_base_of_a_transfer_keeps_its_ratio_to_the_model(shrunk):
    keys = ("optimizer.transfer=completep", "optimizer.base_width=512")
    depth = "optimizer.base_depth=16"
    config = shrunk(["model=llama3_8b", *MESH, *keys, depth]).config
    assert config.model.embed_dim / config.optimizer.base_width == 4096 / 512
    assert config.model.num_layers / config.optimizer.base_depth == 32 / 16


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name.endswith("_nano")])
def test_every_family_is_proved(shrunk, composed, model):
    has_experts = composed([f"model={model}"]).model.expert_layers
    mesh = "mesh.fsdp=2", "mesh.expert=2" if has_experts else "mesh.tensor=2"
    step = DividedStep(shrunk([f"model={model}", *mesh]).config)
    assert not Reference(step, jax.devices()).compare(step).failures


def test_every_mixer_of_a_pattern_stays(shrunk):
    pattern = "[gated_delta,gated_delta,gated_delta,attention]"
    overrides = f"model.mixer_pattern={pattern}", "model.num_layers=16"
    model = shrunk(
        ["model=qwen3_nano", *overrides, *MESH, "data.batch_size=64"]
    ).config.model
    assert model.num_layers == 8
    assert {*model.mixers} == {"gated_delta", "attention"}


def test_ratios_of_heads_experts_and_windows_stay(shrunk):
    model = shrunk(["model=qwen3_30b_a3b", *MESH, "data.batch_size=64"]).config.model
    assert model.num_heads / model.kv_heads == 8
    model = shrunk(["model=mixtral_8x7b", *MESH, "data.batch_size=64"]).config.model
    assert model.num_experts / model.experts_per_token == 4
    length = "data.sequence_length=8192"
    model = shrunk(
        ["model=gemma2_9b", *MESH, "data.batch_size=64", length]
    ).config.model
    assert (model.window, model.num_layers) == (32, 4)


@pytest.mark.parametrize(
    ("overrides", "mesh", "num_left_out"),
    [
        ("mesh.fsdp=-1", {"fsdp": 2}, 0),
        ("mesh.fsdp=11", {"fsdp": 2}, 0),
        ("mesh.context=8 mesh.fsdp=1", {"context": 4}, 0),
        (
            "mesh.pipeline=9 mesh.fsdp=16 mesh.tensor=8",
            {"pipeline": 2, "fsdp": 2, "tensor": 2},
            0,
        ),
        (
            "mesh.pipeline=4 mesh.fsdp=3 model.embed_dim=384",
            {"pipeline": 2, "fsdp": 3},
            0,
        ),
        (
            "mesh.data=4 mesh.fsdp=4 mesh.context=4 mesh.tensor=4",
            {"fsdp": 2, "context": 2, "tensor": 2},
            1,
        ),
    ],
)
def test_a_mesh_gets_at_most_eight_devices(shrunk, overrides, mesh, num_left_out):
    sizes = "model.num_layers=8", "data.batch_size=48", "model.num_kv_heads=4"
    result = shrunk([*sizes, *overrides.split()])
    config = result.config
    assert mesh_of(config.mesh) == mesh
    assert len(result.left_out) == 1 + num_left_out
    devices = jax.devices()[: math.prod(mesh.values())]
    assert make_program(config, devices).mesh.size == len(devices)


def test_microbatches_and_groups_of_layers_stay(shrunk):
    config = shrunk(
        [
            "mesh.pipeline=8",
            "mesh.fsdp=1",
            "mesh.pipeline_repeats=4",
            "train.pipeline_microbatches=64",
            "train.accumulation_steps=4",
            "model.num_layers=64",
            "data.batch_size=512",
            "model.router_aux_weight=0.1",
        ]
    ).config
    assert config.mesh.pipeline_repeats == 2
    assert config.train.pipeline_microbatches == 2 * config.mesh.pipeline
    assert config.train.accumulation_steps == 2
    assert config.model.router_aux_weight == 0


def test_a_new_key_of_the_model_stays_as_it_is(shrunk):
    values = flatten(shrunk(["model=gpt_oss_20b", *MESH, "data.batch_size=64"]).config)
    assert values["model.swiglu_limit"] == 7
    assert values["model.rope_scaling.kind"] == "yarn"
