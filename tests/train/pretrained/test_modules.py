"""Prediction modules in folders have the names and the logits of engines."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.catalog import MODEL_PARTS
from model.count import num_params
from model.gpt import abstract_gpt, bind, params_of
from model.params import named, param_infos
from model.placement import ONE_DEVICE
from tests.train.pretrained.conftest import (
    BYTES,
    FAMILY_NAMES,
    LENGTH,
    MODELS,
    export,
    perturbed,
)
from train.cli.command import compose
from train.core.loss.ahead import look_ahead
from train.errors import ConfigError
from train.pretrained.begin import start_from
from train.pretrained.compare import check_folder
from train.pretrained.families import family_of
from train.pretrained.tensors import FamilyTensors

VOCABULARY = f"model.vocab_size={BYTES.n_vocab}"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def make(programs):
    """Return a function from a name in MODELS and a depth to a program."""

    def make(name: str, depth: int, *overrides: str, devices: int = 1):
        size = ("model.num_layers=2", VOCABULARY, f"model.predict_ahead={depth}")
        return programs([*MODELS[name], *size, *overrides], devices=devices)

    return make


@pytest.fixture
def deepseek(make, tmp_path):
    """Return a folder of a model with one module, and its parameters."""
    program = make("deepseek v3", 1)
    params = perturbed(program.config.model)
    export(tmp_path, program, params)
    return tmp_path, params


def test_the_module_of_deepseek_v3_has_its_published_names_and_size():
    tensors = []
    sizes = []
    for depth in (0, 1):
        model = compose(["model=deepseek_v3", f"model.predict_ahead={depth}"]).model
        abstract = abstract_gpt(model, MODEL_PARTS)
        parts = FamilyTensors(
            family_of(model), model, param_infos(abstract), model.vocab_size
        )
        tensors.append(parts.shapes(dict(named(params_of(abstract)))))
        sizes.append(num_params(abstract))
    plain_shapes, module_shapes = tensors
    # The router's bias of 256 experts is not in the published 11,610,067,968.
    assert sizes[1] - sizes[0] == 11_610_067_968 + 256
    module = {k: v for k, v in module_shapes.items() if k not in plain_shapes}
    layer = {k: v for k, v in plain_shapes.items() if "layers.60." in k}
    assert len(layer) > 3 * 256
    D = 7168
    V = 129280
    assert module == {
        k.replace("layers.60.", "layers.61."): v for k, v in layer.items()
    } | {
        "model.layers.61.enorm.weight": (D,),
        "model.layers.61.hnorm.weight": (D,),
        "model.layers.61.eh_proj.weight": (D, 2 * D),
        "model.layers.61.shared_head.norm.weight": (D,),
        "model.layers.61.embed_tokens.weight": (V, D),
        "model.layers.61.shared_head.head.weight": (V, D),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth"), [("deepseek v3", 2), ("glm 4.5, one group", 1)]
)
def test_modules_come_back_bit_for_bit(make, tmp_path, name, depth):
    program = make(name, depth)
    sharded = make(name, depth, "mesh.fsdp=2", devices=2)
    params = perturbed(program.config.model, scale=1)
    export(tmp_path / "once", program, params)
    settings = json.loads((tmp_path / "once/config.json").read_text())
    assert settings["num_nextn_predict_layers"] == depth
    state = start_from(str(tmp_path / "once"), sharded)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    export(tmp_path / "again", sharded, state.params)
    for file in (WEIGHTS, "config.json"):
        first, second = ((tmp_path / x / file).read_bytes() for x in ("once", "again"))
        assert first == second
    tensors = load_file(tmp_path / "once" / WEIGHTS)
    np.testing.assert_array_equal(
        tensors[f"model.layers.{1 + depth}.shared_head.head.weight"],
        params["head"]["weight"].T,
    )


def test_modules_that_a_run_does_not_want_are_left_out(make, deepseek, capsys):
    folder, params = deepseek
    state = start_from(str(folder), make("deepseek v3", 0))
    plain_params = {k: v for k, v in params.items() if k != "predict_ahead"}
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(state.params), plain_params
    )
    assert "tensors of prediction modules are not read" in capsys.readouterr().out


def test_another_number_of_modules_is_refused(make, deepseek):
    with pytest.raises(ConfigError, match=r"to take its .* model\.predict_ahead=1"):
        check_folder(str(deepseek[0]), make("deepseek v3", 2))


def test_a_copy_may_be_missing_but_not_differ(make, deepseek):
    folder, _ = deepseek
    program = make("deepseek v3", 1)
    tensors = load_file(folder / WEIGHTS)
    copy = "model.layers.2.embed_tokens.weight"
    tensors[copy][-1, -1] += 1
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=f"{copy}, which differs from model.embed"):
        check_folder(str(folder), program)
    del tensors[copy]
    save_file(tensors, folder / WEIGHTS)
    check_folder(str(folder), program)
    del tensors["model.layers.2.enorm.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.2\.enorm"):
        check_folder(str(folder), program)


@pytest.mark.parametrize(
    "name", ["qwen3-next", pytest.param("qwen3.5", marks=pytest.mark.slow)]
)
def test_the_module_of_qwen_has_a_block_of_its_own(make, tmp_path, name):
    program = make(name, 1)
    params = perturbed(program.config.model)
    export(tmp_path, program, params, family=FAMILY_NAMES.get(name))
    tensors = load_file(tmp_path / WEIGHTS)
    module_names = {name for name in tensors if name.startswith("mtp.")}
    assert module_names >= {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"}
    assert module_names >= {
        f"mtp.layers.0.mlp.experts.{i}.up_proj.weight" for i in (0, 3)
    }
    assert not any("linear_attn" in name for name in module_names)
    assert not any(name.startswith("model.layers.2") for name in tensors)
    state = start_from(str(tmp_path), program)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    start_from(str(tmp_path), make(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek v3", "glm 4.5"])
def test_transformers_computes_the_same_logits(make, tmp_path, monkeypatch, name):
    """The module has the same logits, and greedy decoding is the same without it."""
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    layers = pytest.importorskip("transformers.modeling_layers")
    program = make(name, 1)
    params = perturbed(program.config.model, scale=0.3)
    export(tmp_path / "with", program, params)
    plain_params = {k: v for k, v in params.items() if k != "predict_ahead"}
    export(tmp_path / "without", make(name, 0), plain_params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "without", attn_implementation="eager"
    )
    # Otherwise transformers knows the modules of the published depths only.
    monkeypatch.setattr(
        type(theirs), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"]
    )
    predictor = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "with", attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, BYTES.n_vocab, (1, LENGTH + 1))
    inputs = torch.tensor(tokens[:, :-1])
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    continuations = [
        m.generate(inputs[:, :8], **options).tolist() for m in (theirs, predictor)
    ]
    assert continuations[0] == continuations[1]
    module = layers.MtpModel.from_pretrained(predictor)
    with torch.no_grad():
        features = predictor.model(inputs).last_hidden_state
        positions = torch.arange(LENGTH)[None]
        features = module.forward_layer(
            0, features, positions, None, input_ids=torch.tensor(tokens[:, 1:])
        )
        expected = predictor.lm_head(features).numpy()[:, :-1]
    float32 = jnp.dtype("float32")
    numerics = program.execution.numerics._replace(compute_dtype=float32)
    execution = program.execution._replace(placement=ONE_DEVICE, numerics=numerics)
    model = bind(program.model, params)
    tokens = jnp.asarray(tokens, jnp.int32)
    inputs = tokens[:, :-1]
    positions = jnp.arange(LENGTH)[None]
    x, *_ = model.features(inputs, positions, None, execution)
    lookahead = look_ahead(inputs, tokens[:, 1:], None, 1)
    (x,), _ = model.features_ahead(x, lookahead, positions, None, execution)
    logits = model.logits(x, execution)[:, :-1, : BYTES.n_vocab]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=1e-4)
