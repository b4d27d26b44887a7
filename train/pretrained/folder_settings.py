"""Read the settings in a folder's config.json: their keys, defaults and older forms."""

from collections.abc import Sequence
from typing import Any

# The numbers of prediction modules, which are not compared if the model has none.
PREDICTION_LAYERS = (
    *("num_nextn_predict_layers", "num_mtp_layers"),
    "mtp_num_hidden_layers",
)
# Settings that are not compared, because a run may train with other dropout rates.
NOT_COMPARED = "attention_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop"

# Settings for which null means "none". For other settings, null means "not stated".
NULL_IS_NONE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "q_lora_rank",
)

# The key of `model.*` that determines each setting.
KEYS = {
    **{"hidden_size": "embed_dim", "n_embd": "embed_dim"},
    **{"num_hidden_layers": "num_layers", "n_layer": "num_layers"},
    **{"num_attention_heads": "num_heads", "n_head": "num_heads"},
    **{"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"},
    **{"intermediate_size": "mlp_dim", "n_inner": "mlp_dim"},
    **{"num_local_experts": "num_experts", "num_experts": "num_experts"},
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_dim",
    "norm_topk_prob": "router_normalized",
    **{"n_routed_experts": "num_experts", "n_shared_experts": "shared_experts"},
    **{"n_group": "router_groups", "topk_group": "router_groups_kept"},
    "routed_scaling_factor": "routed_scaling",
    **{"first_k_dense_replace": "dense_layers", "use_qk_norm": "qk_norm"},
    **{"rms_norm_eps": "norm_epsilon", "layer_norm_epsilon": "norm_epsilon"},
    **{"attention_bias": "bias", "tie_word_embeddings": "tied_head"},
    **{"sliding_window": "window", "query_pre_attn_scalar": "query_scale_dim"},
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logit_soft_cap",
    **{"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
    "layer_types": "layer_pattern",
    **{"q_lora_rank": "query_rank", "kv_lora_rank": "kv_rank"},
    **{"qk_nope_head_dim": "nope_head_dim", "qk_rope_head_dim": "rope_head_dim"},
    "v_head_dim": "value_head_dim",
    **dict.fromkeys(PREDICTION_LAYERS, "predict_ahead"),
    **{"linear_num_key_heads": "delta_key_heads"},
    **{"linear_num_value_heads": "delta_value_heads"},
    **{"linear_key_head_dim": "delta_key_dim"},
    **{"linear_value_head_dim": "delta_value_dim"},
    "linear_conv_kernel_dim": "delta_conv_width",
}
# The words of the keys of `model.*` for the kinds in layer_types.
LAYER_KINDS = {
    "layer_pattern": {"sliding_attention": "local", "full_attention": "global"},
    "mixer_pattern": {"linear_attention": "gated_delta", "full_attention": "attention"},
}
_SCALING = {
    **{"rope_theta": "rope_theta", "rope_type": "rope_scaling.kind"},
    **{"factor": "rope_scaling.factor", "truncate": "rope_scaling.truncate"},
    "original_max_position_embeddings": "rope_scaling.original_length",
    **{"low_freq_factor": "rope_scaling.slow_turns"},
    **{"high_freq_factor": "rope_scaling.fast_turns"},
    **{"beta_slow": "rope_scaling.slow_turns", "beta_fast": "rope_scaling.fast_turns"},
    "attention_factor": "rope_scaling.attention_factor",
    "partial_rotary_factor": "rotary_fraction",
    "mscale": "rope_scaling.mscale",
    "mscale_all_dim": "rope_scaling.mscale_all_dim",
}
# Defaults of rope_theta other than 10,000. Source: transformers 5.23,
# configuration_*.py of these families.
_DEFAULT_THETAS = {
    **{"mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150e3, "olmo3": 500e3}
}
# Defaults of partial_rotary_factor, for families that have it.
_DEFAULT_FRACTIONS = {"glm4_moe": 0.5, "qwen3_next": 0.25, "qwen3_5_moe_text": 0.25}
# The key of `model.*` for each setting of rotary positions, by kind of layer.
ROPE_KEYS = {
    "full_attention": _SCALING,
    "sliding_attention": {"rope_theta": "rope_theta_local"},
}


def with_layer_types(settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the settings in config.json, with the family's layer_types if missing.

    `num_layers` is the default of num_hidden_layers. The last layer of each period has
    full attention. Source: transformers 5.23, configuration_*.py of these families.
    """
    windowed = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
    hybrid = {"qwen3_next": 4, "qwen3_5_moe_text": 4}
    default = (windowed | hybrid).get(settings["model_type"])
    if default is None or settings.get("layer_types") is not None:
        return settings
    windows = "sliding_window_pattern", "_sliding_window_pattern"
    keys = (*windows, "full_attention_interval")
    period = next(filter(None, map(settings.get, keys)), default)
    numbers = range(1, settings.get("num_hidden_layers", num_layers) + 1)
    first_kind = "linear" if settings["model_type"] in hybrid else "sliding"
    kinds = [f"{first_kind if n % period else 'full'}_attention" for n in numbers]
    return settings | {"layer_types": kinds}


def pattern_of(layer_types: Sequence[str], key: str) -> list[str]:
    """Return the shortest repeating pattern, in the words of a key of `model.*`."""
    layers = [LAYER_KINDS[key].get(kind, kind) for kind in layer_types]
    lengths = range(1, len(layers) + 1)
    periods = (n for n in lengths if layers[n:] == layers[: len(layers) - n])
    return layers[: next(periods, 0)]


def rope_of(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary settings in config.json, by kind of layer.

    Files of older versions of transformers are read too. Source: transformers 5.23,
    modeling_rope_utils.py.
    """
    parameters = settings.get("rope_parameters") or {}
    if "full_attention" in parameters:
        return parameters
    model_type = str(settings.get("model_type"))
    theta = settings.get("rope_theta") or _DEFAULT_THETAS.get(model_type, 10e3)
    rope = {"rope_type": "default", "rope_theta": theta}
    if model_type in _DEFAULT_FRACTIONS:
        default = _DEFAULT_FRACTIONS[model_type]
        rope["partial_rotary_factor"] = settings.get("partial_rotary_factor", default)
    rope = rope | (settings.get("rope_scaling") or {}) | parameters
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    if rope["rope_type"] == "yarn" and "kv_lora_rank" in settings:
        rope = {"mscale": 0.0, "mscale_all_dim": 0.0} | rope
    local_thetas = {
        "gemma3_text": settings.get("rope_local_base_freq") or 10e3,
        "olmo3": rope["rope_theta"],
    }
    if model_type not in local_thetas:
        return {"full_attention": rope}
    local_rope = {"rope_type": "default", "rope_theta": local_thetas[model_type]}
    return {"full_attention": rope, "sliding_attention": local_rope}
