"""The settings in a folder's config.json, and the keys of `model.*` that they mean."""

from collections.abc import Sequence

# The numbers of prediction modules, which are not compared if the model has none.
PREDICTION_LAYERS = (
    *("num_nextn_predict_layers", "num_mtp_layers"),
    "mtp_num_hidden_layers",
)
# Settings that are not compared: a run may train with other dropout rates and longer
# rows, and tensors tell the number of tokens.
NOT_COMPARED = (
    *("attention_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop"),
    *("max_position_embeddings", "n_positions", "vocab_size"),
)
# Settings that a config.json may leave out if transformers has no class of its type.
OPTIONAL_WITHOUT_CLASS = ("rope_interleave",)

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
# The key of `model.*` for each setting of rotary positions, by kind of layer.
ROPE_KEYS = {
    "full_attention": _SCALING,
    "sliding_attention": {"rope_theta": "rope_theta_local"},
}


def pattern_of(layer_types: Sequence[str], key: str) -> list[str]:
    """Return the shortest repeating pattern, in the words of a key of `model.*`."""
    layers = [LAYER_KINDS[key].get(kind, kind) for kind in layer_types]
    lengths = range(1, len(layers) + 1)
    periods = (n for n in lengths if layers[n:] == layers[: len(layers) - n])
    return layers[: next(periods, 0)]
