"""A setting that config.json omits has the value that transformers assumes."""

import json
from pathlib import Path

import pytest

from tests.train.pretrained.conftest import BYTES, FAMILY_NAMES, LENGTH, MODELS
from train.cli.command import compose
from train.errors import ConfigError
from train.pretrained.families import family_of
from train.pretrained.folder import exported_settings
from train.pretrained.folder_family import family_of_folder


def model_of(name: str, *overrides: str):
    """Return a model of MODELS with some overrides."""
    size = ("model.num_layers=12", f"model.vocab_size={BYTES.n_vocab}")
    return compose([*MODELS[name], *size, *overrides]).model


def write_config(folder: Path, name: str, **changes: object) -> str:
    """Write that model's config.json with some changes; None omits a setting."""
    model = model_of(name)
    family = family_of(model, FAMILY_NAMES.get(name))
    settings = exported_settings(family, model, BYTES, LENGTH, "float32") | changes
    content = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "said", "pattern"),
    [
        # transformers reads neither this key of Gemma 2 nor the last one of Gemma 3.
        ("gemma2", {"sliding_window_pattern": 3}, "local,global"),
        ("gemma3", {}, "local,local,local,local,local,global"),
        ("gemma3", {"sliding_window_pattern": 3}, "local,local,global"),
        (
            "gemma3",
            {"_sliding_window_pattern": 4},
            "local,local,local,local,local,global",
        ),
        ("gpt-oss", {}, "local,global"),
        ("olmo3", {}, "local,local,local,global"),
    ],
)
def test_another_pattern_is_refused_by_name(tmp_path, name, said, pattern):
    folder = write_config(tmp_path, name, layer_types=None, **said)
    family_of_folder(folder, model_of(name, f"model.layer_pattern=[{pattern}]"))
    for candidate in {"local", "local,global", "global,local", "local,local,global"}:
        if candidate != pattern:
            with pytest.raises(ConfigError, match="layer_pattern is") as error:
                family_of_folder(
                    folder, model_of(name, f"model.layer_pattern=[{candidate}]")
                )
            assert f"model.layer_pattern=[{pattern}]" in str(error.value)


@pytest.mark.parametrize(
    ("said", "pattern"),
    [
        ({}, "gated_delta,gated_delta,gated_delta,attention"),
        ({"full_attention_interval": 2}, "gated_delta,attention"),
    ],
)
def test_another_pattern_of_mixers_is_refused_by_name(tmp_path, said, pattern):
    folder = write_config(tmp_path, "qwen3-next", layer_types=None, **said)
    family_of_folder(folder, model_of("qwen3-next", f"model.mixer_pattern=[{pattern}]"))
    other_model = model_of("qwen3-next", "model.mixer_pattern=[attention,gated_delta]")
    with pytest.raises(ConfigError, match="mixer_pattern is") as error:
        family_of_folder(folder, other_model)
    assert f"model.mixer_pattern=[{pattern}]" in str(error.value)


@pytest.mark.parametrize(
    ("setting", "other"),
    [("scale_attn_by_inverse_layer_idx", True), ("scale_attn_weights", False)],
)
def test_scores_that_gpt2_scales_otherwise_are_refused(tmp_path, setting, other):
    for usual in (not other, None):
        family_of_folder(
            write_config(tmp_path, "gpt2", **{setting: usual}), model_of("gpt2")
        )
    folder = write_config(tmp_path, "gpt2", **{setting: other})
    with pytest.raises(ConfigError, match=rf"{setting} is \w+, there \w+"):
        family_of_folder(folder, model_of("gpt2"))


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("llama", "rope_theta=10000", "rope_theta=500000"),
        ("mixtral", "rope_theta=1000000", "rope_theta=10000"),
        ("gemma3", "rope_theta_local=10000", "rope_theta_local=20000"),
        ("olmo3", "rope_theta_local=500000", "rope_theta_local=20000"),
        ("glm 4.5", "rotary_fraction=0.5", "rotary_fraction=0.25"),
        ("qwen3.5", "rotary_fraction=0.25", "rotary_fraction=0.5"),
    ],
)
def test_omitted_rotations_have_the_usual_values(tmp_path, name, usual, other):
    keys = (
        "rope_parameters",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
    )
    folder = write_config(tmp_path, name, **dict.fromkeys(keys))
    family_of_folder(folder, model_of(name, f"model.{usual}"))
    with pytest.raises(ConfigError, match=f"model.{other.split('=')[0]} is"):
        family_of_folder(folder, model_of(name, f"model.{other}"))


@pytest.mark.parametrize(
    ("name", "setting", "key"),
    [
        ("mistral", "sliding_window", "window"),
        ("gemma2", "attn_logit_softcapping", "attention_soft_cap"),
        ("gemma2", "final_logit_softcapping", "logit_soft_cap"),
    ],
)
def test_null_turns_a_setting_off(tmp_path, name, setting, key):
    folder = write_config(tmp_path, name)
    model = model_of(name)
    family_of_folder(folder, model)
    settings = json.loads((tmp_path / "config.json").read_text()) | {setting: None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"model\.{key} is \S+, there null"):
        family_of_folder(folder, model)


def test_what_a_family_does_not_read_is_not_advised(tmp_path):
    settings = {"sliding_window": 131072, "layer_types": ["full_attention"] * 12}
    folder = write_config(tmp_path, "qwen2", **settings)
    with pytest.raises(ConfigError, match=r"model\.embed_dim=128") as error:
        family_of_folder(folder, model_of("qwen2", "model.embed_dim=64"))
    assert "model.window" not in str(error.value)
    assert "layer_pattern" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "left_out", "said"),
    [
        ("mistral", "sliding_window", "model.window is 7, there 4096"),
        ("gemma2", "query_pre_attn_scalar", "there 256"),
        ("gemma2", "attn_logit_softcapping", "attention_soft_cap is 2.0, there 50.0"),
        ("gemma2", "tie_word_embeddings", None),
        ("gemma3", "head_dim", "head_dim is 48, there 256"),
        ("qwen3", "tie_word_embeddings", "tied_head is true, there false"),
        ("qwen3", "num_key_value_heads", "there 32"),
        (
            "llama with biases, tied",
            "tie_word_embeddings",
            "tied_head is true",
        ),
        ("deepseek v3", "routed_scaling_factor", "there 2.5"),
        ("deepseek v3", "q_lora_rank", "query_rank is"),
        ("deepseek v3", "n_group", "there 8"),
        ("gpt-oss", "swiglu_limit", "swiglu_limit is 0.5, there 7.0"),
        ("gpt-oss", "rms_norm_eps", None),
        ("mixtral", "num_experts_per_tok", None),
        ("glm 4.5", "first_k_dense_replace", None),
        ("gpt2", "vocab_size", "vocab_size is 257, there 50257"),
    ],
)
def test_what_is_left_out_is_the_default_of_the_class(tmp_path, name, left_out, said):
    model = model_of(name)
    aliases = {"num_experts": None, "num_local_experts": None}
    other_omissions = aliases if left_out == "num_experts" else {}
    folder = write_config(tmp_path, name, **{left_out: None}, **other_omissions)
    if said is None:
        family_of_folder(folder, model)
        return
    with pytest.raises(ConfigError, match="leaves it out") as error:
        family_of_folder(folder, model)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is false"),
        ("gpt2", {"hidden_size": 99}, "embed_dim is"),
        ("mixtral", {"num_experts": 99}, "num_experts is"),
        ("deepseek v3", {"num_local_experts": 99}, "num_experts is"),
        ("deepseek v3", {"rope_interleave": False}, "rope_interleave is true"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, None),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 8},
            "window is null, there 8, which Longhaul does not have in this family",
        ),
        ("llama", {"layer_types": ["attention"]}, None),
        ("gemma3", {"layer_types": ["full_attention"]}, "has 1 entries"),
        ("llama", {"per_layer_config": {"0": {"head_dim": 2}}}, "per_layer_config"),
        ("llama", {"text_config": {"hidden_size": 2}}, "states text_config"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "lack factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lack low_f"),
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "cannot use"),
        ("gemma2", {"num_hidden_layers": 10**12, "layer_types": None}, "above 100000"),
        ("llama", {"hidden_size": "wide"}, "embed_dim is"),
        ("llama", {"rope_parameters": [1]}, "cannot use"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "must hold settings of"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {}}},
            "lacks full_attention",
        ),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "divided by kind"),
    ],
)
def test_other_settings_are_read_as_transformers_reads_them(
    tmp_path, name, changed, said
):
    model = model_of(name)
    folder = write_config(tmp_path, name, **changed)
    if said is None:
        family_of_folder(folder, model)
        return
    with pytest.raises(ConfigError) as error:
        family_of_folder(folder, model)
    assert said in str(error.value)


def test_a_type_without_a_class_has_no_defaults(tmp_path):
    folder = write_config(tmp_path, "deepseek v3", model_type="kimi_k2", n_group=None)
    with pytest.raises(ConfigError, match=r"kimi_k2, for which .* must state n_group"):
        family_of_folder(folder, model_of("deepseek v3"))
    folder = write_config(tmp_path, "deepseek v3", model_type="kimi_k2")
    family_of_folder(folder, model_of("deepseek v3"))


@pytest.mark.parametrize(
    "content",
    ["[]", "3", "null", '"llama"', "{", "{}", pytest.param("[" * 10**5, id="deep")],
)
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        family_of_folder(str(tmp_path), model_of("llama"))
