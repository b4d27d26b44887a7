"""Training starts from the weights that others wrote or that we exported."""

import json
import shlex

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data.errors import DataError
from model.catalog import MODEL_PARTS
from model.gpt import GPT, params_of
from model.params import is_info, named
from tests.train.pretrained.conftest import (
    BYTES,
    FAMILY_NAMES,
    MODELS,
    export,
    perturbed,
)
from train.errors import ConfigError
from train.pretrained.begin import start_from
from train.pretrained.compare import check_folder

CUBE = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
VOCABULARY = f"model.vocab_size={BYTES.n_vocab}"


@pytest.fixture(scope="module")
def exported(programs, tmp_path_factory):
    """Return a function from a name in MODELS to a folder and its parameters."""

    def make(name: str):
        program = programs([*MODELS[name], "model.num_layers=2", VOCABULARY], devices=1)
        params = perturbed(program.config.model, scale=1, seed=7)
        folder = tmp_path_factory.mktemp("exported")
        export(folder, program, params, family=FAMILY_NAMES.get(name))
        return folder, params

    return make


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", CUBE),
        # The last quarter of the table has no token of the folder.
        ("gpt2", ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=4")),
        pytest.param("olmo2", CUBE, marks=pytest.mark.slow),
        pytest.param("olmo3", CUBE, marks=pytest.mark.slow),
        pytest.param("qwen2", (), marks=pytest.mark.slow),
        pytest.param("gemma3", CUBE, marks=pytest.mark.slow),
        pytest.param("mixtral", CUBE, marks=pytest.mark.slow),
        pytest.param(
            "qwen3 with experts",
            ("mesh.expert=2", "mesh.data=1"),
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3-next", CUBE, marks=pytest.mark.slow),
        # A device has half of each key head's outputs.
        pytest.param(
            "qwen3-next",
            ("mesh.params.head_dim=fsdp", "mesh.fsdp=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3.5",
            ("mesh.expert=2", "mesh.tensor=2", "mesh.fsdp=2"),
            marks=pytest.mark.slow,
        ),
        ("gpt-oss", ("mesh.expert=2", "mesh.tensor=2", "mesh.fsdp=2")),
        pytest.param(
            "glm 4.5",
            ("mesh.expert=2", "mesh.tensor=2", "mesh.fsdp=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param("glm 4.5, one group", CUBE, marks=pytest.mark.slow),
        pytest.param("deepseek v3", CUBE, marks=pytest.mark.slow),
        # A device has half of each head's rotated dims.
        pytest.param(
            "deepseek v2",
            ("mesh.params.head_dim=fsdp", "mesh.fsdp=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2 without biases, untied",
            ("mesh.params.head_dim=fsdp", "mesh.fsdp=2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exported_weights_are_read_back_bit_for_bit(programs, exported, name, mesh):
    folder, params = exported(name)
    size = ("model.num_layers=2", "model.vocab_size=384")  # The folder has 257.
    table = ("mesh.params.embed=null",) * (len(mesh) == 2)
    devices = 8 if len(mesh) == 3 else max(1, len(mesh))
    program = programs([*MODELS[name], *size, *mesh, *table], devices=devices)
    state = start_from(str(folder), program)
    assert int(state.step) == 0
    infos = dict(named(program.infos, is_info))
    initial = dict(named(jax.device_get(program.init().params)))
    for path, array in named(params):
        ours = np.asarray(dict(named(state.params))[path])
        axes = infos[path].axes
        if "vocab" in axes:
            dim = axes.index("vocab")
            ours, padding = np.split(ours, [BYTES.n_vocab], axis=dim)
            _, expected = np.split(initial[path], [BYTES.n_vocab], axis=dim)
            np.testing.assert_array_equal(padding, expected)
        np.testing.assert_array_equal(ours, array, err_msg=path)


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "llama 3.1", "llama, yarn", "mistral", "qwen2", "qwen3", "olmo2"),
        *("gemma2", "gemma3", "mixtral", "qwen3 with experts", "gpt-oss", "gpt2"),
        *("olmo3", "glm 4.5", "glm 4.5, one group", "deepseek v2", "deepseek v3"),
        *("qwen3-next", "qwen3.5"),
    ],
)
def test_transformers_own_folder_loads(programs, tmp_path, family):
    transformers = pytest.importorskip("transformers")
    program = programs([*MODELS[family], "model.num_layers=2", VOCABULARY], devices=1)
    params = params_of(GPT(program.config.model, nnx.Rngs(0), MODEL_PARTS))
    export(tmp_path / "ours", program, params, family=FAMILY_NAMES.get(family))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    check_folder(str(tmp_path / "theirs"), program)
    our_arrays, their_arrays = (
        load_file(tmp_path / f / "model.safetensors") for f in ("ours", "theirs")
    )
    assert our_arrays.keys() == their_arrays.keys()
    for name, array in our_arrays.items():
        np.testing.assert_array_equal(array, their_arrays[name])


@pytest.fixture
def llama(programs, exported):
    size = ("model.num_layers=2", VOCABULARY)
    return exported("llama")[0], lambda overrides=(): programs(
        [*MODELS["llama"], *size, *overrides], devices=1
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_layers=3", "model.num_layers=2"),
        ("model.rope_theta=500", "model.rope_theta=10000.0"),
        ("model.vocab_size=200", "model.vocab_size=257"),
        ("model.qk_norm=true", "model.qk_norm=false"),
    ],
)
def test_another_model_is_refused_before_anything_is_read(llama, override, said):
    folder, program = llama
    with pytest.raises(ConfigError) as error:
        check_folder(str(folder), program([override]))
    (mistake,) = error.value.mistakes
    assert mistake.value == str(folder)
    key, _, value = override.partition("=")
    assert f"{key} is {value}{'.0' * ('theta' in key)}, there" in mistake.rule
    assert said in mistake.rule.partition("to take its settings type ")[2]


def test_the_advised_overrides_build_the_folders_model(llama, programs):
    folder, _ = llama
    with pytest.raises(ConfigError) as error:
        check_folder(str(folder), programs(["model=gpt2_124m", VOCABULARY], devices=1))
    (mistake,) = error.value.mistakes
    assert "holds a model of type llama" in mistake.rule
    overrides = shlex.split(mistake.rule.partition("to take its settings type ")[2])
    vocabulary = (
        "model.vocab_size=257" if "model.vocab_size=257" in overrides else VOCABULARY
    )
    check_folder(
        str(folder), programs(["model=gpt2_124m", *overrides, vocabulary], devices=1)
    )


def change(folder, **settings) -> None:
    """Change settings of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_weights_of_four_bits_are_refused(llama):
    folder, program = llama
    change(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match=r"quantized weights \(mxfp4\)"):
        check_folder(str(folder), program())


def test_no_folder_is_a_mistake(llama, tmp_path):
    with pytest.raises(ConfigError, match="must be a folder with config"):
        check_folder(str(tmp_path), llama[1]())


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize("version", [4, 5])
def test_positions_must_have_the_same_scaling(llama, version):
    folder, program = llama
    if version == 5:
        change(folder, rope_parameters={"rope_theta": 1e4, **SCALED})
    else:
        change(folder, rope_parameters=None, rope_scaling=SCALED)
    with pytest.raises(ConfigError, match=r"kind is none, there llama3"):
        check_folder(str(folder), program())
    scaling = "model.rope_scaling.kind=llama3", "model.rope_scaling.original_length=32"
    check_folder(str(folder), program([*scaling, "model.rope_scaling.factor=8"]))
    with pytest.raises(ConfigError, match=r"factor is 4.0, there 8.0"):
        check_folder(str(folder), program([*scaling, "model.rope_scaling.factor=4"]))


def test_a_mistral_without_window_is_a_llama(llama):
    folder, program = llama
    change(folder, model_type="mistral", sliding_window=None)
    check_folder(str(folder), program())
    change(folder, sliding_window=8)
    with pytest.raises(ConfigError, match=r"model\.window=8"):
        check_folder(str(folder), program())


def test_an_index_must_match_its_files(llama):
    """Older folders also list masks and angles, which are not weights."""
    folder, program = llama
    file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    arrays = load_file(file)
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(arrays, file)
    weight_map = dict.fromkeys(arrays, file.name)
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_folder(str(folder), program())
    wrong_index = {"weight_map": weight_map | {"another": file.name}}
    for content in (json.dumps(wrong_index), "{", "[]", "{}"):
        index.write_text(content)
        with pytest.raises(DataError, match="index"):
            check_folder(str(folder), program())


def test_a_separate_head_is_never_dropped(programs, tmp_path):
    """Transformers uses it, although config.json says that the head is tied."""
    tied = (*MODELS["llama with biases, tied"], "model.num_layers=2", VOCABULARY)
    program = programs(tied, devices=1)
    export(tmp_path, program, perturbed(program.config.model))
    file = tmp_path / "model.safetensors"
    arrays = load_file(file)
    embedding = arrays["model.embed_tokens.weight"]
    untied = programs([*tied, "model.tied_head=false"], devices=1)
    with pytest.raises(ConfigError, match="tied_head is false, there true"):
        check_folder(str(tmp_path), untied)
    save_file(arrays | {"lm_head.weight": embedding}, file)
    check_folder(str(tmp_path), program)
    with pytest.raises(ConfigError, match=r"set model\.tied_head=true"):
        check_folder(str(tmp_path), untied)
    save_file(arrays | {"lm_head.weight": embedding + 1}, file)
    with pytest.raises(ConfigError, match=r"set model\.tied_head=false"):
        check_folder(str(tmp_path), program)
    check_folder(str(tmp_path), untied)


def add_tensors(folder, **tensors) -> None:
    """Add tensors to a folder."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.bias"),
        *("model.layers.0.self_attn.q_norm.weight", "model.norm.bias", "lm_head.bias"),
        *("model.layers.0.attn.bias", "model.layers.0.self_attn.masked_bias"),
        *("model.layers.2.input_layernorm.weight", "mtp.fc.weight", "score.weight"),
        *("model.visual.patch_embed.weight", "model.language_model.norm.weight"),
        *("model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.sinks"),
    ],
)
def test_tensors_that_the_model_lacks_are_refused(llama, name):
    folder, program = llama
    add_tensors(folder, **{name: np.zeros(4, np.float32)})
    change(folder, num_nextn_predict_layers=10**12)
    with pytest.raises(ConfigError, match="that the model lacks"):
        check_folder(str(folder), program())


def test_files_and_tensors_that_are_not_read_are_reported(llama, capsys):
    folder, program = llama
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensors(folder, **{name: np.ones(4, np.float32)})
    (folder / "consolidated.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"")
    start_from(str(folder), program())
    output = capsys.readouterr().out
    assert "1 tensors of masks or rotary frequencies are not read" in output
    assert "the weights in consolidated.safetensors are not read" in output
    assert "the weights in pytorch_model.bin are not read" in output


def test_adapters_and_repeated_tensors_are_refused(llama):
    folder, program = llama
    add_tensors(folder, **{"norm.weight": np.ones(4, np.float32)})
    with pytest.raises(DataError, match="has the same tensor"):
        check_folder(str(folder), program())
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter"):
        check_folder(str(folder), program())


def test_an_index_next_to_a_file_of_another_save_is_refused(llama):
    folder, program = llama
    shard = folder / "model-00001-of-00001.safetensors"
    shard.write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = dict.fromkeys(load_file(shard), shard.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match="would read instead"):
        check_folder(str(folder), program())
    (folder / "model.safetensors").unlink()
    check_folder(str(folder), program())


@pytest.mark.parametrize("size", [256, 258, None])
def test_a_vocabulary_of_another_size_is_refused(llama, size):
    """Transformers cannot load it. None stands for a missing setting."""
    folder, program = llama
    change(folder, vocab_size=size)
    if size is None:
        settings = json.loads((folder / "config.json").read_text())
        del settings["vocab_size"]
        (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"vocab_size (is|in)"):
        check_folder(str(folder), program())


@pytest.fixture
def glm(programs, exported):
    """Return a folder of a GLM, and a function to its program."""
    folder, _ = exported("glm 4.5")
    name = MODELS["glm 4.5"]
    size = "model.num_layers=2"
    return folder, lambda overrides=(): programs(
        [*name, size, VOCABULARY, *overrides], devices=1
    )


def test_layers_that_predict_further_tokens_are_left_out(glm):
    folder, make = glm
    tensors = load_file(folder / "model.safetensors")
    extra_tensors = {
        name.replace("layers.1.", "layers.2."): array
        for name, array in tensors.items()
        if "layers.1." in name
    }
    save_file(tensors | extra_tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has a tensor model\.layers\.2"):
        check_folder(str(folder), make())
    change(folder, num_nextn_predict_layers=1)
    check_folder(str(folder), make())


def test_a_routers_bias_is_never_dropped(glm):
    folder, make = glm
    with pytest.raises(ConfigError, match=r"not zero; set model\.router_bias_rate"):
        check_folder(str(folder), make(["model.router_bias_rate=0"]))


@pytest.mark.slow
def test_a_published_qwen3_5_is_read_without_its_other_parts(programs, tmp_path):
    """It has a prefix, all experts in two tensors, images and a prediction module."""
    overrides = (*MODELS["qwen3.5"], "model.num_layers=2", VOCABULARY)
    program = programs(overrides, devices=1)
    params = perturbed(program.config.model)
    export(tmp_path, program, params, family="qwen3_5_moe_text")
    file = tmp_path / "model.safetensors"
    settings = tmp_path / "config.json"
    tensors = load_file(file)
    published = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
        if ".experts." not in name
    }
    for layer in range(2):
        name = f"layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack(
                [tensors[f"model.{name}.{e}.{part}_proj.weight"] for e in range(8)]
            )
            for part in ("gate", "up", "down")
        )
        fused = f"model.language_model.{name}"
        published[f"{fused}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        published[f"{fused}.down_proj"] = down
    image = {"model.visual.patch_embed.proj.bias": np.ones(3, np.float32)}
    prediction = {"mtp.fc.weight": np.ones((2, 4), np.float32)}
    save_file(published | image | prediction, file)
    text = json.loads(settings.read_text())
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    settings.write_text(json.dumps(config))
    mesh = ("mesh.fsdp=2", "mesh.expert=2")
    state = start_from(str(tmp_path), programs([*overrides, *mesh], devices=4))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    with pytest.raises(ConfigError, match=r"model\.embed_dim is 48, there 32"):
        check_folder(
            str(tmp_path), programs([*overrides, "model.embed_dim=48"], devices=1)
        )


def test_names_of_gpt2_without_prefix_are_the_same(programs, exported):
    folder, params = exported("gpt2")
    file = folder / "model.safetensors"
    arrays = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    arrays["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(arrays, file)
    program = programs([*MODELS["gpt2"], "model.num_layers=2", VOCABULARY], devices=1)
    state = start_from(str(folder), program)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)


def test_an_average_starts_at_the_weights(llama):
    folder, program = llama
    state = start_from(str(folder), program(["optimizer.ema_decay=0.9"]))
    average = state.optimizer.average
    jax.tree.map(np.testing.assert_array_equal, average, state.params)
    pairs = zip(*map(jax.tree.leaves, (average, state.params)), strict=True)
    assert not any(a is p for a, p in pairs)  # The step donates both.
