"""The settings in transformers' config.json for a model of each family."""

from typing import Any

from model.choices import Scaling
from model.config import ModelConfig
from train.pretrained.folder_settings import LAYER_KINDS


def _rope_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary settings, for versions 5 and 4 of transformers."""
    scaling = model.rope_scaling
    scaling_settings = dict[str, Any]()
    if scaling.kind is not Scaling.none:
        scaling_settings = {"rope_type": str(scaling.kind), "factor": scaling.factor}
    if scaling.kind in (Scaling.llama3, Scaling.yarn):
        scaling_settings["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind is Scaling.llama3:
        scaling_settings["low_freq_factor"] = scaling.slow_turns
        scaling_settings["high_freq_factor"] = scaling.fast_turns_or_default
    if scaling.kind is Scaling.yarn:
        scaling_settings |= {
            "beta_slow": scaling.slow_turns,
            "beta_fast": scaling.fast_turns_or_default,
        }
        scaling_settings["truncate"] = scaling.truncate
        scaling_settings["attention_factor"] = scaling.yarn_factor
        if model.has_latent_attention:
            scaling_settings |= {
                "attention_factor": scaling.attention_factor,
                "mscale": scaling.mscale,
                "mscale_all_dim": scaling.mscale_all_dim,
            }
    parameters = {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        "rope_parameters": parameters | scaling_settings,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling_settings or None,
    }


def llama(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Llama, and OLMo 2 (which ignores mlp_bias)."""
    return {
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.dropout.attention,
        **_rope_settings(model),
    }


def qwen(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen 3."""
    settings = llama(model)
    del settings["mlp_bias"]
    return settings | {"use_sliding_window": False}


def qwen2(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen 2 and 2.5."""
    settings = qwen(model)
    del settings["attention_bias"]  # Qwen 2 always has biases
    return settings


def mistral(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Mistral."""
    return llama(model) | {"sliding_window": model.window}


def deepseek_v2(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of DeepSeek V2."""
    settings = llama(model)
    del settings["head_dim"]  # which transformers sets to qk_rope_head_dim
    return settings | {
        "q_lora_rank": model.query_rank,
        "kv_lora_rank": model.kv_rank,
        "qk_nope_head_dim": model.nope_head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.value_head_dim,
        "topk_method": "group_limited_greedy" if model.router_groups > 1 else "greedy",
        **deepseek_experts(model),
    }


def deepseek_v3(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of DeepSeek V3."""
    settings = deepseek_v2(model)
    del settings["mlp_bias"]
    # transformers does not read the last two, but other engines do.
    return settings | {
        "rope_interleave": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def mixtral(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Mixtral."""
    settings = mistral(model)
    del settings["attention_bias"], settings["mlp_bias"]  # Mixtral has no biases
    return settings | {
        "intermediate_size": model.expert_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
    }


def qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen 3 with experts, for transformers 5 and 4."""
    settings = qwen(model)
    del settings["intermediate_size"]  # the dim of layers without experts
    return settings | {
        "moe_intermediate_size": model.expert_size,
        "num_local_experts": model.num_experts,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def deepseek_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of experts and router in DeepSeek V2 and V3."""
    return {
        "intermediate_size": model.mlp_size,
        "moe_intermediate_size": model.expert_size,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.shared_experts,
        "num_experts_per_tok": model.experts_per_token,
        "first_k_dense_replace": model.dense_layers,
        "n_group": model.router_groups,
        "topk_group": model.router_groups_kept,
        "norm_topk_prob": model.router_normalized,
        "routed_scaling_factor": model.routed_scaling,
        "num_nextn_predict_layers": model.predict_ahead,
        "num_mtp_layers": model.predict_ahead,
    }


def glm4_moe(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of GLM 4.5 and 4.6."""
    settings = _with_rotary_fraction(llama(model) | deepseek_experts(model), model)
    del settings["mlp_bias"]
    return settings | {"attention_bias": model.qkv_bias, "use_qk_norm": model.qk_norm}


def _with_rotary_fraction(
    settings: dict[str, Any], model: ModelConfig
) -> dict[str, Any]:
    """Return settings with the rotated fraction, for versions 5 and 4."""
    fraction = {"partial_rotary_factor": model.rotary_fraction}
    rope = {"rope_parameters": settings["rope_parameters"] | fraction}
    return settings | rope | fraction


def qwen3_5_moe(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen 3.5's text model with experts."""
    settings = _with_rotary_fraction(qwen3_moe(model), model)
    key_heads, value_heads, key_dim, value_dim = model.delta_sizes
    kinds = {word: kind for kind, word in LAYER_KINDS["mixer_pattern"].items()}
    return settings | {
        "shared_expert_intermediate_size": model.shared_experts * model.expert_size,
        "layer_types": [kinds[mixer] for mixer in model.mixers],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": model.delta_conv_width,
        "attn_output_gate": True,
        "num_nextn_predict_layers": model.predict_ahead,
        "mtp_num_hidden_layers": model.predict_ahead,
    }


def qwen3_next(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen3-Next."""
    settings = qwen3_5_moe(model) | {"decoder_sparse_step": model.experts_every}
    if model.experts_every > 1:
        settings["intermediate_size"] = model.mlp_size
    return settings


def gpt_oss(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of gpt-oss."""
    return mixtral(model) | {
        "attention_bias": model.bias,
        "layer_types": _layer_types(model),
        "swiglu_alpha": model.swiglu_alpha,
        "swiglu_limit": model.swiglu_limit,
    }


def _layer_types(model: ModelConfig) -> list[str]:
    kinds = {True: "full_attention", False: "sliding_attention"}
    return [kinds[window is None] for window in model.windows]


def gemma2(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Gemma 2."""
    settings = llama(model)
    del settings["hidden_act"], settings["mlp_bias"]
    return settings | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.query_scale_dim or model.head_size,
        "attn_logit_softcapping": model.attention_soft_cap,
        "final_logit_softcapping": model.logit_soft_cap,
        "sliding_window": model.window,
        "layer_types": _layer_types(model),
    }


def gemma3(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of Gemma 3's text model."""
    settings = _with_local_rope(gemma2(model), model)
    return settings | {"rope_local_base_freq": model.rope_theta_local}


def olmo3(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of OLMo 3, for versions 5 and 4 of transformers."""
    layer_types = {"layer_types": _layer_types(model)}
    return _with_local_rope(mistral(model) | layer_types, model)


def _with_local_rope(settings: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return settings with the rotary settings of each kind of layer."""
    local_rope = {"rope_type": "default", "rope_theta": model.rope_theta_local}
    by_layer_type = {
        "full_attention": settings["rope_parameters"],
        "sliding_attention": local_rope,
    }
    return settings | {"rope_parameters": by_layer_type}


def gpt2(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of GPT-2."""
    return {
        "n_embd": model.embed_dim,
        "n_inner": model.mlp_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.dropout.embedding,
        "attn_pdrop": model.dropout.attention,
        "resid_pdrop": model.dropout.residual,
    }
