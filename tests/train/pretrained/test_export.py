"""For transformers, an export is the same model with the same tokenizer."""

import json
import math
import tracemalloc
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import tiktoken
from flax import nnx
from safetensors.numpy import load_file

from data.encoding import FolderEncoding
from data.tokenizer_json import SAMPLE, check_same_ids, tokenizer_json
from model.catalog import MODEL_PARTS
from model.gpt import GPT, abstract_gpt, bind, params_of
from model.params import named, param_infos
from model.placement import ONE_DEVICE
from tests.fleet import REPOSITORY
from tests.train.pretrained.conftest import (
    BYTES,
    FAMILY_NAMES,
    LENGTH,
    MODELS,
    export,
    perturbed,
)
from train.cli.command import compose
from train.errors import ConfigError
from train.pretrained import families, weights
from train.pretrained.families import family_of
from train.pretrained.folder import (
    exported_settings,
    require_empty_folder,
    write_folder,
)
from train.pretrained.tensors import FamilyTensors
from train.pretrained.weights import write_weights
from train.run.folder import run_folder

SLOW = (
    "qwen3 with experts",
    "qwen3-next",
    "qwen3.5",
    "gpt-oss",
    "glm 4.5",
    "glm 4.5, one group",
    "deepseek v2",
)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS
    ]
)
def model(request, programs):
    """Return a small model's program, its changed parameters, and its family."""
    program = programs([*MODELS[request.param], "model.num_layers=2"], devices=1)
    params = perturbed(program.config.model)
    return program, params, FAMILY_NAMES.get(request.param)


def test_yarns_factor_is_the_ratio_of_the_two_lengths(configure):
    # Version 4 of transformers computes it from them.
    model = configure(MODELS["llama, yarn"]).model
    settings = exported_settings(family_of(model), model, BYTES, LENGTH, "float32")
    scaling = settings["rope_scaling"]
    factor = settings["max_position_embeddings"] / 16
    assert factor == scaling["factor"] == 4
    assert scaling["original_max_position_embeddings"] == 16


def test_transformers_computes_the_same_logits(model, tmp_path):
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    program, params, family = model
    export(tmp_path, program, params, family=family)
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


def test_large_models_are_several_files(programs, tmp_path, monkeypatch):
    program = programs(["model=llama_nano", "model.num_layers=2"], devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0), MODEL_PARTS))
    (tmp_path / "one").mkdir()
    export(tmp_path / "one", program, params)
    monkeypatch.setattr(weights, "FILE_BYTES", 30_000)
    export(tmp_path / "many", program, params)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted({*index["weight_map"].values()}) == files
    arrays = load_file(tmp_path / "one/model.safetensors")
    for name, array in arrays.items():
        actual = load_file(tmp_path / "many" / index["weight_map"][name])[name]
        np.testing.assert_array_equal(actual, array)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())


def test_an_export_holds_one_tensor_at_a_time_in_host_memory(programs, tmp_path):
    """It does not hold the file, which is about thirty times as large."""
    overrides = "model.layer_unroll=1", "model.vocab_size=512"
    program = programs(
        ["model=llama_nano", "model.num_layers=16", *overrides], devices=1
    )
    params = program.init().params
    parts = export(tmp_path / "once", program, params)  # This compiles first.
    largest = 4 * max(map(math.prod, parts.shapes(dict(named(params))).values()))
    tracemalloc.start()
    output = run_folder(str(tmp_path / "again"))
    write_weights(output, parts, dict(named(params)), jnp.dtype("float32"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (tmp_path / "again/model.safetensors").stat().st_size
    assert peak < 4 * largest < size / 4


@pytest.mark.slow
def test_an_object_store_holds_the_same_bytes(programs, tmp_path, monkeypatch, server):
    program = programs(["model=llama_nano", "model.num_layers=2"], devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0), MODEL_PARTS))
    monkeypatch.setattr(weights, "FILE_BYTES", 30_000)
    export(tmp_path / "local", program, params)
    export("s3://bucket/exported", program, params)
    local = {file.name: file.read_bytes() for file in (tmp_path / "local").iterdir()}
    remote = run_folder("s3://bucket/exported").iterdir()
    assert {file.name: file.read_bytes() for file in remote} == local
    assert len(local) > 4
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        require_empty_folder("s3://bucket/exported")


def test_a_model_of_no_family_is_refused_with_all_that_differs(composed):
    truncate = "model.rope_scaling.truncate"
    for overrides, expected in (
        (
            (),
            {
                *("model.activation", "model.rotary_fraction"),
                *("model.logit_soft_cap", "model.token_shift"),
            },
        ),
        ((*MODELS["mixtral"], "model.shared_experts=1"), {"model.shared_experts"}),
        ((*MODELS["llama"], "model.predict_ahead=1"), {"model.predict_ahead"}),
        ((*MODELS["llama"], "model.token_shift=mlp"), {"model.token_shift"}),
        (
            (*MODELS["qwen3-next"], "model.attention_gate=false"),
            {"model.attention_gate"},
        ),
        (
            (*MODELS["olmo3"], "model.rope_theta=1e4", f"{truncate}=false"),
            {"model.rope_theta_local", truncate},
        ),
        ((*MODELS["gemma3"], f"{truncate}=false"), {truncate}),
    ):
        with pytest.raises(ConfigError, match="must be") as error:
            family_of(composed(overrides).model)
        assert {mistake.key for mistake in error.value.mistakes} == expected


def test_the_guide_names_all_families():
    guide = REPOSITORY / "docs/guides/exporting.md"
    text = guide.read_text()
    assert [f.name for f in families.FAMILIES if f"`{f.name}`" not in text] == []


def test_a_named_family_must_fit(configure):
    model = configure(MODELS["qwen3.5"]).model
    assert family_of(model, "qwen3_5_moe_text").name == "qwen3_5_moe_text"
    with pytest.raises(ConfigError, match="router_normalized = false"):
        family_of(replace(model, router_normalized=False), "qwen3_5_moe_text")
    with pytest.raises(ConfigError, match="must be null or one of llama, "):
        family_of(model, "qwen3_5_moe_test")


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3_405b", 405_853_388_800),
        ("mistral_7b", 7_241_732_096),
        ("qwen2_5_7b", 7_615_616_512),
        ("olmo2_7b", 7_298_617_344),
        ("gemma2_9b", 9_241_705_984),
        ("gemma3_4b", 3_880_263_168),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_next_80b_a3b", 79_674_391_296),
        ("qwen3_5_35b_a3b", 34_660_610_688),
        ("gpt_oss_20b", 20_914_757_184),
        ("glm_4_5_air", 106_852_251_264),
        ("gpt2_124m", 124_439_808),
    ],
)
def test_full_size_models_have_their_published_size(preset, count):
    model = compose([f"model={preset}"]).model
    abstract = abstract_gpt(model, MODEL_PARTS)
    infos = param_infos(abstract)
    parts = FamilyTensors(family_of(model), model, infos, model.vocab_size)
    shapes = parts.shapes(dict(named(params_of(abstract))))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count


def test_the_tokenizer_is_the_same():
    tokenizers = pytest.importorskip("tokenizers")
    content = json.dumps(tokenizer_json(BYTES))
    check_same_ids(BYTES, content, [SAMPLE])
    theirs = tokenizers.Tokenizer.from_str(content)
    assert theirs.decode(theirs.encode(SAMPLE).ids) == SAMPLE


@pytest.mark.parametrize("bos_token", [None, 257])
@pytest.mark.parametrize("rule", ["true", "false"])
def test_the_folder_begins_texts_as_training_began_documents(
    programs, store, tmp_path, rule, bos_token
):
    """Texts begin with the BOS that an imported tokenizer adds, or with end-of-text.

    The imported tokenizer itself does not change.
    """
    tokenizers = pytest.importorskip("tokenizers")
    if bos_token is not None:
        arguments = {
            "pat_str": r"\S+|\s+",
            "mergeable_ranks": {bytes([byte]): byte for byte in range(256)},
            "special_tokens": {"<|endoftext|>": 256, "<s>": 257},
        }
        content = tokenizer_json(tiktoken.Encoding("own", **arguments))
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [bos_token], "tokens": ["<s>"]}
            },
        }
        encoding = FolderEncoding(
            "imported",
            files={"tokenizer.json": json.dumps(content)},
            bos_token=bos_token,
            **arguments,
        )
        stores = {n: replace(s, encoding=encoding) for n, s in store.stores.items()}
        store = replace(store, stores=stores)
    overrides = (*MODELS["llama"], "model.num_layers=2", f"data.document_start={rule}")
    program = programs(overrides, devices=1)
    params = perturbed(program.config.model)
    folder = require_empty_folder(str(tmp_path / "out"))
    write_folder(folder, program, params, store, 0, "float32", True)
    first = bos_token or 256
    if rule == "false":
        first = 256
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["bos_token_id"] == first
    exported = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert exported.token_to_id(settings["bos_token"]) == first
    prefix = [bos_token] if bos_token else []
    assert exported.encode("a b").ids == [*prefix, *b"a b"]
    assert exported.encode("a b", add_special_tokens=False).ids == [*b"a b"]
