"""Known families of models, and the `ModelConfig` values that each family needs.

Sources: transformers 5.23, models/*/modeling_*.py and configuration_*.py, for names,
layouts and settings. Rotary positions (model/rope.py) pair the same dims (i, i + P) as
transformers, except in families that pair neighbours (`interleaved`). Norms that
multiply by 1 + scale store the same scale as transformers.
"""

from collections.abc import Callable
from typing import Any

from data.errors import Mistake
from model.attention.kind import ATTENTION
from model.choices import (
    Activation,
    Mlp,
    Norm,
    NormPlacement,
    NormSpan,
    Position,
    Scaling,
    Scores,
    TokenShift,
)
from model.config import LATENT_ATTENTION, ModelConfig
from model.parts.delta.kind import GATED_DELTA
from train.errors import ConfigError
from train.pretrained import names, settings
from train.pretrained.family import NOT_NULL, Family

# The values that a family needs unless its entry in FAMILIES says otherwise.
_USUAL: dict[str, Any] = {
    "mixer": ATTENTION.name,
    "predict_ahead": 0,
    "mixer_pattern": None,
    "token_shift": TokenShift.none,
    "norm": Norm.rmsnorm,
    "norm_placement": NormPlacement.before,
    "norm_unit_offset": False,
    "position": Position.rotary,
    "rotary_fraction": 1.0,
    "rope_theta_local": None,
    "rope_scaling.kind": Scaling.none,
    "window": None,
    "layer_pattern": None,
    "query_scale_dim": None,
    "attention_soft_cap": None,
    "attention_sinks": False,
    "attention_gate": False,
    "activation": Activation.swiglu,
    "qk_norm": False,
    "qkv_bias": False,
    "scaled_embedding": False,
    "mlp": Mlp.dense,
    "logit_soft_cap": None,
}


def _usual(*free: str, **required: Any) -> dict[str, Any]:
    """Return the usual needs, updated by `required` and without the `free` fields."""
    return {k: v for k, v in (_USUAL | required).items() if k not in free}


_GEMMA = {
    "norm_placement": NormPlacement.both,
    "norm_unit_offset": True,
    "window": NOT_NULL,
    "activation": Activation.geglu,
    "scaled_embedding": True,
    "bias": False,
}


# transformers 5.24 ignores truncate in rotary settings by kind of layer.
_ROPE_BY_LAYER = {"rope_scaling.truncate": True}


_EXPERTS = {
    "mlp": Mlp.moe,
    "shared_experts": 0,
    "dense_layers": 0,
    "experts_every": 1,
    "router": Scores.softmax,
    "router_bias_rate": 0.0,
    "router_groups": 1,
    "routed_scaling": 1.0,
    "bias": False,
}


def _if_grouped(best: int) -> Callable[[ModelConfig], int]:
    """Return the need for `router_group_best`, which one group does not read."""
    return lambda m: m.router_group_best if m.router_groups == 1 else best


# The needs of experts and router in DeepSeek V3, and in models that follow it.
DEEPSEEK_V3_EXPERTS = {
    "mlp": Mlp.moe,
    "shared_experts": lambda model: max(1, model.shared_experts),
    "shared_expert_gate": False,
    "experts_every": 1,
    "router": Scores.sigmoid,
    "router_group_best": _if_grouped(2),
    "bias": False,
}
# V2 has no bias of the router, and transformers ignores its norm_topk_prob.
DEEPSEEK_V2_EXPERTS = DEEPSEEK_V3_EXPERTS | {
    "router": Scores.softmax,
    "router_group_best": _if_grouped(1),
    "router_bias_rate": 0.0,
    "router_normalized": False,
}
_INTERLEAVED = tuple(
    f".attention.{name}.weight" for name in ("query", "query_up", "key_value_down")
)


# The needs of Qwen3-Next and Qwen 3.5.
_HYBRID = _EXPERTS | {
    "predict_ahead": lambda model: min(1, model.predict_ahead),
    "shared_experts": lambda model: max(1, model.shared_experts),
    "shared_expert_gate": True,
    "mixer_pattern": lambda model: tuple(
        GATED_DELTA.name if mixer == GATED_DELTA.name else ATTENTION.name
        for mixer in model.mixer_pattern or (model.mixer,)
    ),
    "norm_unit_offset": True,
    "attention_gate": True,
    "qk_norm": True,
    "qk_norm_over": NormSpan.head,
}
_MIXERS = {"layer_types": "mixer_pattern"}
_SCALING_KIND = "rope_scaling.kind"
_EXPERT_SIZE = {"intermediate_size": "expert_dim"}
FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _usual(_SCALING_KIND),
        names.LLAMA,
        settings.llama,
        compatible_types=("mistral",),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _usual(_SCALING_KIND, window=NOT_NULL, bias=False),
        names.LLAMA,
        settings.mistral,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _usual(_SCALING_KIND, qkv_bias=True, bias=False),
        names.LLAMA,
        settings.qwen2,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _usual(_SCALING_KIND, qk_norm=True, qk_norm_over=NormSpan.head, bias=False),
        names.LLAMA,
        settings.qwen,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _usual(
            _SCALING_KIND,
            norm_placement=NormPlacement.after,
            qk_norm=True,
            qk_norm_over=NormSpan.projection,
            bias=False,
        ),
        names.OLMO2,
        settings.llama,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _usual(
            *(_SCALING_KIND, "layer_pattern"),
            norm_placement=NormPlacement.after,
            qk_norm=True,
            qk_norm_over=NormSpan.projection,
            bias=False,
            window=NOT_NULL,
            # Version 4 of transformers has one theta for all layers.
            rope_theta_local=lambda model: model.rope_theta,
            **_ROPE_BY_LAYER,
        ),
        names.OLMO2,
        settings.olmo3,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _usual(
            *("layer_pattern", "query_scale_dim", "attention_soft_cap"),
            "logit_soft_cap",
            **_GEMMA,
        ),
        names.GEMMA,
        settings.gemma2,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _usual(
            *("layer_pattern", "query_scale_dim", _SCALING_KIND),
            **_GEMMA,
            **_ROPE_BY_LAYER,
            rope_theta_local=NOT_NULL,
            qk_norm=True,
            qk_norm_over=NormSpan.head,
        ),
        names.GEMMA,
        settings.gemma3,
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _usual(_SCALING_KIND, **DEEPSEEK_V2_EXPERTS, mixer=LATENT_ATTENTION),
        names.DEEPSEEK,
        settings.deepseek_v2,
        interleaved=_INTERLEAVED,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _usual(
            *(_SCALING_KIND, "predict_ahead"),
            **DEEPSEEK_V3_EXPERTS,
            mixer=LATENT_ATTENTION,
        ),
        names.DEEPSEEK,
        settings.deepseek_v3,
        zero_biases=(".router.balance",),
        compatible_types=("kimi_k2",),
        interleaved=_INTERLEAVED,
        ahead_names=names.DEEPSEEK_AHEAD,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        _usual(_SCALING_KIND, "window", **_EXPERTS, router_normalized=True),
        names.MIXTRAL,
        settings.mixtral,
        keys=_EXPERT_SIZE,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _usual(_SCALING_KIND, **_EXPERTS, qk_norm=True, qk_norm_over=NormSpan.head),
        names.QWEN3_MOE,
        settings.qwen3_moe,
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _usual("mixer", "rotary_fraction", "experts_every", **_HYBRID),
        names.QWEN3_NEXT,
        settings.qwen3_next,
        keys=_MIXERS | {"decoder_sparse_step": "experts_every"},
        by_key_head=("in_proj_qkvz.weight", "in_proj_ba.weight"),
        ahead_names=names.QWEN3_NEXT_AHEAD,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _usual("mixer", "rotary_fraction", **_HYBRID, router_normalized=True),
        names.QWEN3_5_MOE,
        settings.qwen3_5_moe,
        compatible_types=("qwen3_5_moe",),
        keys=_MIXERS,
        ahead_names=names.QWEN3_NEXT_AHEAD,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _usual(
            *(_SCALING_KIND, "window", "layer_pattern"),
            **(_EXPERTS | {"bias": True}),
            router_normalized=True,
            activation=Activation.clamped_swiglu,
            attention_sinks=True,
        ),
        names.GPT_OSS,
        settings.gpt_oss,
        keys=_EXPERT_SIZE,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _usual(
            *("rotary_fraction", "qkv_bias", "qk_norm", "predict_ahead"),
            **DEEPSEEK_V3_EXPERTS,
            qk_norm_over=NormSpan.head,
        ),
        names.GLM4_MOE,
        settings.glm4_moe,
        zero_biases=(".router.balance",),
        keys={"attention_bias": "qkv_bias"},
        ahead_names=names.GLM4_MOE_AHEAD,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _usual(
            *("rotary_fraction", _SCALING_KIND),
            norm=Norm.layernorm,
            position=Position.learned,
            activation=Activation.gelu,
            num_kv_heads=lambda model: model.num_heads,
            head_dim=lambda model: model.embed_dim // model.num_heads,
        ),
        names.GPT2,
        settings.gpt2,
        transposed=False,
        zero_biases=(".bias",),
        length_key="n_positions",
    ),
)


def family_of(model: ModelConfig, name: str | None = None) -> Family:
    """Return the family that a model belongs to, or the family of a name if it fits.

    Raises:
        ConfigError: if no family fits, with every difference from the nearest family;
            or if no family has the name.
    """
    families = [family for family in FAMILIES if name in (None, family.name)]
    if not families:
        family_names = ", ".join(family.name for family in FAMILIES)
        rule = f"must be null or one of {family_names}"
        raise ConfigError([Mistake("family", name, rule)])

    def distance(family: Family) -> tuple[int, bool]:
        unmet = family.unmet_needs(model)
        return len(unmet), "mlp" in unmet

    nearest = min(families, key=distance)
    if mistakes := nearest.need_mistakes(model):
        raise ConfigError(mistakes)
    return nearest
