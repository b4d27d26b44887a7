"""What is exported is, for transformers, the same model with the same tokenizer."""

import json
import math
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from data.tokenizer import load_tokenizer
from data.tokenizer_json import SAMPLE, check_same_ids, tokenizer_json
from model.gpt import GPT, abstract_gpt, bind, params_of
from model.params import named, param_infos
from model.placement import ONE_DEVICE
from train.cli.command import compose, to_yaml
from train.config import RunConfig
from train.errors import ConfigError
from train.export import ExportConfig, main
from train.pretrained import weights
from train.pretrained.families import family_of
from train.pretrained.folder import empty_folder, settings_of
from train.pretrained.tensors import Parts
from train.pretrained.weights import write_json, write_weights
from train.run.folder import run_folder

BYTES = load_tokenizer("bytes")
LENGTH = 48
MODELS = {
    "llama": ("model=llama_nano",),
    "llama with biases, tied": (
        "model=llama_nano",
        "model.bias=true",
        "model.tied_head=true",
    ),
    "qwen3": ("model=qwen3_nano",),
    "llama 3.1": (
        "model=llama_nano",
        "model.rope_scaling.kind=llama3",
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "llama, yarn": (
        "model=llama_nano",
        "model.rope_scaling.kind=yarn",
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "mistral": ("model=mistral_nano", "model.window=7"),
    "qwen2": ("model=qwen2_nano",),
    "olmo2": ("model=olmo2_nano",),
    "gemma2": ("model=gemma2_nano", "model.window=7", "model.attention_soft_cap=2"),
    "gemma3": (
        *("model=gemma3_nano", "model.window=7", "model.layer_pattern=[local,global]"),
        *("model.rope_scaling.kind=linear", "model.rope_scaling.factor=4"),
    ),
    "mixtral": ("model=mixtral_nano", "model.embed_dim=32", "model.window=7"),
    "qwen3 with experts": (
        *("model=mixtral_nano", "model.embed_dim=32", "model.qk_norm=true"),
        "model.router_normalized=false",
    ),
    "gpt-oss": (
        *("model=gpt_oss_nano", "model.embed_dim=32", "model.window=7"),
        *("model.expert_dim=24", "model.swiglu_limit=0.5"),
        *("model.rope_scaling.kind=yarn", "model.rope_scaling.truncate=false"),
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "gpt2": ("model=gpt2_nano", "model.max_sequence_length=48"),
    "gpt2 without biases, untied": (
        "model=gpt2_nano",
        "model.max_sequence_length=48",
        "model.bias=false",
        "model.tied_head=false",
    ),
}


SLOW = ("qwen3 with experts", "gpt-oss")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS
    ]
)
def model(request, programs):
    """A program of a small model, and parameters of which none is what it was drawn."""
    program = programs(*MODELS[request.param], "model.num_layers=2", devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params
    )
    return program, params


def test_yarns_factor_is_that_of_the_two_lengths(configure):
    # Version 4 of transformers computes it from them.
    model = configure(*MODELS["llama, yarn"]).model
    settings = settings_of(family_of(model), model, BYTES, LENGTH, "float32")
    scaling = settings["rope_scaling"]
    factor = settings["max_position_embeddings"] / 16
    assert factor == scaling["factor"] == 4
    assert scaling["original_max_position_embeddings"] == 16


def export(folder, program, params, dtype="float32"):
    family = family_of(program.config.model)
    parts = Parts(family, program.config.model, program.infos, BYTES.n_vocab)
    where = run_folder(str(folder))
    write_weights(where, parts, dict(named(params)), jnp.dtype(dtype))
    settings = settings_of(family, program.config.model, BYTES, LENGTH, dtype)
    write_json(where / "config.json", settings)
    return parts


def test_transformers_computes_the_same_logits(model, tmp_path):
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    program, params = model
    export(tmp_path, program, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, BYTES.n_vocab, (2, LENGTH))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    execution = program.execution._replace(
        placement=ONE_DEVICE,
        numerics=program.execution.numerics._replace(
            compute_dtype=jnp.dtype("float32")
        ),
    )
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    bound = bind(program.model, params)
    features, *_ = bound.features(
        jnp.asarray(tokens, jnp.int32), positions, None, execution
    )
    logits = bound.logits(features, execution)[..., : BYTES.n_vocab]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_every_parameter_is_written_once(model, tmp_path):
    program, params = model
    parts = export(tmp_path, program, params)
    arrays = load_file(tmp_path / "model.safetensors")
    assert {name: a.shape for name, a in arrays.items()} == parts.shapes(
        dict(named(params))
    )


def test_large_models_are_several_files(programs, tmp_path, monkeypatch):
    program = programs("model=llama_nano", "model.num_layers=2", devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0)))
    (tmp_path / "one").mkdir()
    export(tmp_path / "one", program, params)
    monkeypatch.setattr(weights, "FILE_BYTES", 30_000)
    export(tmp_path / "many", program, params)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted({*index["weight_map"].values()}) == files
    whole = load_file(tmp_path / "one/model.safetensors")
    for name, array in whole.items():
        own = load_file(tmp_path / "many" / index["weight_map"][name])[name]
        np.testing.assert_array_equal(own, array)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole.values())


def test_memory_holds_one_tensor_beside_the_devices(programs, tmp_path):
    """And not the file, which is some thirty times as large."""
    small = "model.layer_unroll=1", "model.vocab_size=512"
    program = programs("model=llama_nano", "model.num_layers=16", *small, devices=1)
    params = program.init().params
    parts = export(tmp_path / "once", program, params)  # compiled
    largest = 4 * max(map(math.prod, parts.shapes(dict(named(params))).values()))
    tracemalloc.start()
    where = run_folder(str(tmp_path / "again"))
    write_weights(where, parts, dict(named(params)), jnp.dtype("float32"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (tmp_path / "again/model.safetensors").stat().st_size
    assert most < 4 * largest < size / 4


def test_a_mesh_changes_no_byte(programs, tmp_path):
    files = []
    for mesh in ((), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")):
        program = programs("model=llama_nano", *mesh, devices=8 if mesh else 1)
        params = params_of(GPT(program.config.model, nnx.Rngs(0)))
        params = jax.device_put(params, program.shardings.params)
        folder = tmp_path / str(len(files))
        with jax.set_mesh(program.mesh):
            export(folder, program, params, "bfloat16")
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.slow
def test_an_object_store_holds_the_same_bytes(programs, tmp_path, monkeypatch, server):
    program = programs("model=llama_nano", "model.num_layers=2", devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0)))
    monkeypatch.setattr(weights, "FILE_BYTES", 30_000)
    export(tmp_path / "local", program, params)
    export("s3://bucket/exported", program, params)
    own = {file.name: file.read_bytes() for file in (tmp_path / "local").iterdir()}
    remote = run_folder("s3://bucket/exported").iterdir()
    assert {file.name: file.read_bytes() for file in remote} == own
    assert len(own) > 4
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        empty_folder("s3://bucket/exported")


def test_what_no_family_has_beside_experts_is_refused(composed):
    with pytest.raises(ConfigError) as error:
        family_of(composed(*MODELS["mixtral"], "model.shared_experts=1").model)
    keys = [mistake.key for mistake in error.value.mistakes]
    assert keys == ["model.shared_experts"]


def test_what_no_family_holds_is_refused_with_all_that_differs(composed):
    with pytest.raises(ConfigError) as error:
        family_of(composed().model)
    keys = {mistake.key for mistake in error.value.mistakes}
    assert keys == {"model.activation", "model.rotary_fraction", "model.logit_soft_cap"}
    rules = {mistake.key: mistake.rule for mistake in error.value.mistakes}
    assert rules["model.logit_soft_cap"].startswith("must be null for transformers'")


@pytest.mark.parametrize(
    ("preset", "said"), [("gpt_nano", "the family that fits"), ("llama_nano", "pip")]
)
def test_the_family_is_asked_for_before_any_package(
    composed, tmp_path, monkeypatch, preset, said
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = composed(f"model={preset}")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    asked = ExportConfig(RunConfig(dir=str(tmp_path)), output=f"{tmp_path}/out")
    with pytest.raises(ConfigError, match=said):
        main(asked)


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_1_8b", 8_030_261_248),
        ("mistral_7b", 7_241_732_096),
        ("qwen2_5_7b", 7_615_616_512),
        ("olmo2_7b", 7_298_617_344),
        ("gemma2_9b", 9_241_705_984),
        ("gemma3_4b", 3_880_263_168),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("gpt_oss_20b", 20_914_757_184),
        ("gpt2_124m", 124_439_808),
    ],
)
def test_full_size_models_have_their_published_size(preset, count):
    model = compose([f"model={preset}"]).model
    abstract = abstract_gpt(model)
    infos = param_infos(abstract)
    parts = Parts(family_of(model), model, infos, model.vocab_size)
    shapes = parts.shapes(dict(named(params_of(abstract))))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count


def test_the_tokenizer_is_the_same():
    tokenizers = pytest.importorskip("tokenizers")
    content = json.dumps(tokenizer_json(BYTES))
    check_same_ids(BYTES, content, [SAMPLE])
    theirs = tokenizers.Tokenizer.from_str(content)
    assert theirs.decode(theirs.encode(SAMPLE).ids) == SAMPLE
