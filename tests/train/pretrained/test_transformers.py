"""Names, losses, token ids and texts are the same as in transformers."""

import json

import jax
import numpy as np
import pytest
import tiktoken
from safetensors.numpy import load_file

from data import bpe
from data.batch import Batch
from data.encoding import decode, encode
from data.tokenizer import RANK_FILE_PATTERN, tokenizer_from_bytes
from data.tokenizer_folder import _BYTE_LEVEL_PATTERN
from data.tokenizer_json import tokenizer_config, tokenizer_json
from model.catalog import MODEL_PARTS
from model.gpt import abstract_gpt, params_of
from model.params import named, param_infos
from tests.data.test_tokenizer_folder import TEXTS
from tests.train.pretrained.conftest import (
    BYTES,
    FAMILY_NAMES,
    MODELS,
    export,
    perturbed,
)
from train.cli.command import compose
from train.core.feed import place
from train.core.step import make_gradients
from train.pretrained.begin import start_from
from train.pretrained.families import family_of
from train.pretrained.folder import exported_settings
from train.pretrained.tensors import FamilyTensors
from train.sample.generate import Sampling, generate
from train.sample.prompts import make_decoder

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


PRESETS = [
    *("llama3_1b", "llama3_8b", "llama3_70b", "llama3_1_8b", "llama3_405b"),
    *("mistral_7b", "qwen2_5_7b", "olmo2_7b", "gemma2_9b", "gemma3_4b"),
    *("mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b", "gpt2_124m", "gpt2_1558m"),
    *("gpt_oss_120b", "qwen3_235b_a22b", "olmo3_7b", "olmo3_32b"),
    "glm_4_5_air",
]


def draw_batch(theirs):
    """Return a batch of 4 x 32 tokens, and the loss of their model on it."""
    tokens = np.random.default_rng(0).integers(0, BYTES.n_vocab, (4, 33), np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32))
    logits = theirs(torch.tensor(tokens[:, :-1])).logits.flatten(0, 1)
    targets = torch.tensor(tokens[:, 1:]).flatten().long()
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return Batch(tokens[:, :-1], tokens[:, 1:], None, positions), loss


@pytest.mark.parametrize(
    ("preset", "family_name"),
    [
        ("qwen3_next_80b_a3b", "qwen3_next"),
        ("qwen3_5_35b_a3b", "qwen3_5_moe_text"),
        *((preset, None) for preset in PRESETS),
    ],
)
def test_full_size_tensors_are_those_that_transformers_writes(preset, family_name):
    """Names, shapes and dtypes are the same; nothing is allocated."""
    loading = pytest.importorskip("transformers.core_model_loading")
    model = compose([f"model={preset}"]).model
    family = family_of(model, family_name)
    ours = abstract_gpt(model, MODEL_PARTS)
    parts = FamilyTensors(family, model, param_infos(ours), model.vocab_size or 0)
    settings = exported_settings(family, model, BYTES, 2048, "bfloat16")
    settings |= {"vocab_size": model.vocab_size}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    their_tensors = loading.revert_weight_conversion(theirs, theirs.state_dict())
    if model.tied_head:
        del their_tensors["lm_head.weight"]  # save_pretrained omits it.
    bfloat16 = np.dtype("bfloat16")
    decays = (".A_log", ".dt_bias")
    for name, tensor in their_tensors.items():
        is_precise = parts.dtype_of(name, bfloat16) != bfloat16
        assert is_precise == name.endswith((".e_score_correction_bias", *decays))
        expected = torch.float32 if is_precise else torch.bfloat16
        # transformers has some routers in float32 and decays in bfloat16, however they
        # are stored.
        may_differ = name.endswith((".mlp.gate.weight", *decays))
        assert may_differ or tensor.dtype is expected
    shapes = {name: tuple(tensor.shape) for name, tensor in their_tensors.items()}
    assert parts.shapes(dict(named(params_of(ours)))) == shapes


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "gpt-oss", "olmo3", "deepseek v2", "deepseek v3"),
        *("glm 4.5", "glm 4.5, one group", "qwen3-next", "qwen3.5"),
    ],
)
def test_gradients_are_the_same(programs, tmp_path, family):
    """The trainer's gradients, in the layout of exported weights, are torch's."""
    overrides = (*MODELS[family], "model.num_layers=2", "model.router_aux_weight=0")
    rows = "data.sequence_length=32", "data.batch_size=4", "data.document_mask=false"
    vocabulary = f"model.vocab_size={BYTES.n_vocab}"
    program = programs([*overrides, *rows, vocabulary], devices=1)
    params = perturbed(program.config.model)
    parts = export(tmp_path, program, params, family=FAMILY_NAMES.get(family))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    batch, expected = draw_batch(theirs)
    expected.backward()
    step = make_gradients(program.model, program.execution, program.recipe)
    (loss,), grads, *_ = jax.jit(step)(params, place(batch, program.batch))
    assert float(loss) == pytest.approx(expected.item(), abs=1e-4)
    ours = {name: parts.read(dict(named(grads)), name) for name in parts.tensors}
    for name in [name for name in ours if name.endswith("correction_bias")]:
        assert not ours.pop(name).any(), name
    loading = pytest.importorskip("transformers.core_model_loading")
    their_grads = loading.revert_weight_conversion(
        theirs, {name: x.grad for name, x in theirs.named_parameters()}
    )
    assert ours.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        grad = grad.numpy()
        scale = np.abs(grad).max()
        assert scale > 1e-6, f"{name} does not matter"
        assert np.abs(ours[name] - grad).max() / scale < 1e-4, name


def test_an_olmo3_that_transformers_wrote_is_the_same_here(programs, tmp_path):
    """Loss and gradients are the same, and weights are written as they were read."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    settings = transformers.Olmo3Config(
        **(sizes | heads),
        **{"vocab_size": BYTES.n_vocab, "sliding_window": 7},
        **{"max_position_embeddings": 64, "rope_theta": 500e3, "rope_scaling": yarn},
        **dict.fromkeys(("pad_token_id", "eos_token_id")),
        initializer_range=0.2,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "theirs")
    batch, expected = draw_batch(theirs)
    expected.backward()
    model_settings = (
        "embed_dim=64",
        "mlp_dim=96",
        "window=7",
        f"vocab_size={BYTES.n_vocab}",
    )
    scaling = ("kind=yarn", "factor=4", "original_length=16")
    program = programs(
        [
            "model=olmo3_nano",
            "model.norm_epsilon=1e-5",
            "model.num_layers=4",
            *(f"model.{setting}" for setting in model_settings),
            *(f"model.rope_scaling.{setting}" for setting in scaling),
            "data.sequence_length=32",
            "data.batch_size=4",
            "data.document_mask=false",
        ],
        devices=1,
    )
    params = start_from(str(tmp_path / "theirs"), program).params
    parts = export(tmp_path / "ours", program, params)
    step = make_gradients(program.model, program.execution, program.recipe)
    (loss,), grads, *_ = jax.jit(step)(params, place(batch, program.batch))
    assert float(loss) == pytest.approx(expected.item(), abs=1e-4)
    for name, parameter in theirs.named_parameters():
        ours = parts.read(dict(named(grads)), name)
        grad = parameter.grad.numpy()
        assert np.abs(ours - grad).max() < 1e-4 * np.abs(grad).max(), name
    copy, source = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("ours", "theirs")
    )
    assert copy.keys() == source.keys()
    for name, array in copy.items():
        np.testing.assert_array_equal(array, source[name])


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "mixtral", "gpt-oss", "glm 4.5", "gpt2"),
        *("deepseek v2", "deepseek v3", "qwen3-next", "qwen3.5"),
    ],
)
def test_a_first_loss_and_a_continuation_are_the_same(programs, tmp_path, family):
    vocabulary = f"model.vocab_size={BYTES.n_vocab}"
    overrides = (*MODELS[family], "model.num_layers=2", vocabulary)
    rows = "data.sequence_length=32", "data.batch_size=4", "data.document_mask=false"
    program = programs([*overrides, *rows, "model.router_aux_weight=0"], devices=1)
    params = perturbed(program.config.model)
    export(tmp_path, program, params, family=FAMILY_NAMES.get(family))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    with torch.no_grad():
        batch, expected = draw_batch(theirs)
        tokens = batch.inputs
        prompt = torch.tensor(tokens[:1, :16])
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
        continuation = theirs.generate(prompt, **options)[0, 16:].tolist()
    state = start_from(str(tmp_path), program)
    decoder = make_decoder(program, BYTES.n_vocab, Sampling(temperature=0.0), 1)
    (ids,) = generate(
        *(decoder, state.params, tokens[:1, :16], np.array([16])),
        key=jax.random.key(0),
        num_tokens=12,
    )
    _, metrics = program.train_step(state, place(batch, program.batch))
    assert float(metrics["loss"]) == pytest.approx(float(expected), abs=1e-4)
    assert ids[0].tolist() == continuation


@pytest.mark.parametrize(
    "pattern", [RANK_FILE_PATTERN, _BYTE_LEVEL_PATTERN], ids=["cl100k", "gpt2"]
)
def test_a_tokenizer_of_ours_gives_the_same_ids_and_texts(tmp_path, pattern):
    """The texts are code, emoji and all scripts of message catalogues."""
    tokenizer = tokenizer_from_bytes("learned", bpe.train(TEXTS, 2048))
    ranks = tokenizer._mergeable_ranks
    special = tokenizer._special_tokens
    encoding = tiktoken.Encoding(
        "own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(encoding)))
    settings = json.dumps(tokenizer_config(10**6))
    (tmp_path / "tokenizer_config.json").write_text(settings)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    emoji = "".join(map(chr, range(0x1F300, 0x1FAFF)))
    for text in (*TEXTS, emoji):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == encode(encoding, text.encode()).tolist()
        assert theirs.decode(ids) == text
    for token in range(encoding.n_vocab):  # Many are parts of a character.
        assert theirs.decode([token]) == decode(encoding, [token])
    assert theirs.eos_token_id == encoding.eot_token
