"""The tensors of each family of models, and the parameters that make up each tensor.

Source: files from `save_pretrained` of transformers 5.23. {} is the layer's index, a
second {} the expert's, and * stands for both `weight` and `bias`. `layers` stands for
the layer's segment and slot too (model/pattern.py). A tensor of all experts is
[E, inputs, outputs], with the outputs of its parameters interleaved. Layers with a
gated delta net have no `self_attn`, and other layers have no `linear_attn`.

In the tensors of prediction modules (model/parts/predict_ahead.py), {layer} is the
number of layers plus the module's number, and `predict_ahead` stands for the module's
number too.
"""

LLAMA = {
    "model.embed_tokens.weight": ["embedding.weight"],
    "model.layers.{}.input_layernorm.weight": ["layers.attention_norm.scale"],
    "model.layers.{}.self_attn.q_proj.*": ["layers.attention.query.*"],
    "model.layers.{}.self_attn.k_proj.*": ["layers.attention.key.*"],
    "model.layers.{}.self_attn.v_proj.*": ["layers.attention.value.*"],
    "model.layers.{}.self_attn.q_norm.weight": ["layers.attention.query_norm.scale"],
    "model.layers.{}.self_attn.k_norm.weight": ["layers.attention.key_norm.scale"],
    "model.layers.{}.self_attn.o_proj.*": ["layers.attention.output.*"],
    "model.layers.{}.post_attention_layernorm.weight": ["layers.mlp_norm.scale"],
    "model.layers.{}.mlp.gate_proj.*": ["layers.mlp.gate.*"],
    "model.layers.{}.mlp.up_proj.*": ["layers.mlp.up.*"],
    "model.layers.{}.mlp.down_proj.*": ["layers.mlp.down.*"],
    "model.norm.weight": ["norm.scale"],
    "lm_head.weight": ["head.weight"],
}
GPT2 = {
    "transformer.wte.weight": ["embedding.weight"],
    "transformer.wpe.weight": ["positions.weight"],
    "transformer.h.{}.ln_1.weight": ["layers.attention_norm.scale"],
    "transformer.h.{}.ln_1.bias": ["layers.attention_norm.bias"],
    "transformer.h.{}.attn.c_attn.*": [
        f"layers.attention.{name}.*" for name in ("query", "key", "value")
    ],
    "transformer.h.{}.attn.c_proj.*": ["layers.attention.output.*"],
    "transformer.h.{}.ln_2.weight": ["layers.mlp_norm.scale"],
    "transformer.h.{}.ln_2.bias": ["layers.mlp_norm.bias"],
    "transformer.h.{}.mlp.c_fc.*": ["layers.mlp.up.*"],
    "transformer.h.{}.mlp.c_proj.*": ["layers.mlp.down.*"],
    "transformer.ln_f.weight": ["norm.scale"],
    "transformer.ln_f.bias": ["norm.bias"],
    "lm_head.weight": ["head.weight"],
}


_INPUT_NORMS = ("input_layernorm", "post_attention_layernorm")
_OUTPUT_NORMS = {
    "model.layers.{}.post_attention_layernorm.weight": [
        "layers.attention_output_norm.scale"
    ],
    "model.layers.{}.post_feedforward_layernorm.weight": [
        "layers.mlp_output_norm.scale"
    ],
}
OLMO2 = {
    k: v for k, v in LLAMA.items() if k.split(".")[-2] not in _INPUT_NORMS
} | _OUTPUT_NORMS
GEMMA = (
    LLAMA
    | _OUTPUT_NORMS
    | {"model.layers.{}.pre_feedforward_layernorm.weight": ["layers.mlp_norm.scale"]}
)
MIXTRAL = LLAMA | {
    "model.layers.{}.block_sparse_moe.gate.weight": ["layers.mlp.router.weight"],
    "model.layers.{}.block_sparse_moe.experts.{}.w1.weight": ["layers.mlp.gate"],
    "model.layers.{}.block_sparse_moe.experts.{}.w2.weight": ["layers.mlp.down"],
    "model.layers.{}.block_sparse_moe.experts.{}.w3.weight": ["layers.mlp.up"],
}
EXPERTS = {
    "model.layers.{}.mlp.gate.weight": ["layers.mlp.router.weight"],
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": ["layers.mlp.gate"],
    "model.layers.{}.mlp.experts.{}.up_proj.weight": ["layers.mlp.up"],
    "model.layers.{}.mlp.experts.{}.down_proj.weight": ["layers.mlp.down"],
}
QWEN3_MOE = LLAMA | EXPERTS


def _shared_experts(name: str) -> dict[str, list[str]]:
    tensors = f"model.layers.{{}}.mlp.{name}"
    return {
        f"{tensors}.{part}_proj.weight": [f"layers.mlp.shared.{part}.weight"]
        for part in ("gate", "up", "down")
    }


# Experts and router of DeepSeek V2 and V3, and of models that follow them.
DEEPSEEK_EXPERTS = {
    **EXPERTS,
    **_shared_experts("shared_experts"),
    "model.layers.{}.mlp.gate.e_score_correction_bias": ["layers.mlp.router.balance"],
}
_LATENT_ATTENTION = {
    "q_proj": "query.weight",
    "q_a_proj": "query_down.weight",
    "q_a_layernorm": "query_norm.scale",
    "q_b_proj": "query_up.weight",
    "kv_a_proj_with_mqa": "key_value_down.weight",
    "kv_a_layernorm": "key_value_norm.scale",
    "kv_b_proj": "key_value_up.weight",
}
DEEPSEEK = {
    **{k: v for k, v in LLAMA.items() if "attn" not in k or "o_proj" in k},
    **{
        f"model.layers.{{}}.self_attn.{tensor}.weight": [f"layers.attention.{param}"]
        for tensor, param in _LATENT_ATTENTION.items()
    },
    **DEEPSEEK_EXPERTS,
}
_DELTA = "model.layers.{}.linear_attn"
_DELTA_NET = {
    f"{_DELTA}.conv1d.weight": [
        f"layers.attention.{name}_taps" for name in ("query", "key", "value")
    ],
    f"{_DELTA}.A_log": ["layers.attention.A_log"],
    f"{_DELTA}.dt_bias": ["layers.attention.dt_bias"],
    f"{_DELTA}.norm.weight": ["layers.attention.output_norm.scale"],
    f"{_DELTA}.out_proj.weight": ["layers.attention.output.weight"],
}


def _delta_projections(**names: tuple[str, ...]) -> dict[str, list[str]]:
    return {
        f"{_DELTA}.in_proj_{tensor}.weight": [
            f"layers.attention.{name}.weight" for name in params
        ]
        for tensor, params in names.items()
    }


_QWEN3_ATTENTION = {
    **LLAMA,
    **EXPERTS,
    **_shared_experts("shared_expert"),
    "model.layers.{}.mlp.shared_expert_gate.weight": ["layers.mlp.shared_gate"],
}
_QWEN3_HYBRID = _QWEN3_ATTENTION | _DELTA_NET
QWEN3_NEXT = _QWEN3_HYBRID | _delta_projections(
    qkvz=("query", "key", "value", "gate"), ba=("beta", "dt")
)
QWEN3_5_MOE = _QWEN3_HYBRID | _delta_projections(
    qkv=("query", "key", "value"), z=("gate",), b=("beta",), a=("dt",)
)
GLM4_MOE = LLAMA | DEEPSEEK_EXPERTS


def module_block(
    layers: dict[str, list[str]], prefix: str = "model.layers.{layer}"
) -> dict[str, list[str]]:
    """Return the tensors of a prediction module's block, given those of a layer."""
    return {
        name.replace("model.layers.{}", prefix): [
            param.replace("layers", "predict_ahead.block", 1) for param in params
        ]
        for name, params in layers.items()
        if name.startswith("model.layers.{}")
    }


# Engines read an embedding and a head for each module, which are the model's.
_DEEPSEEK_MODULE = {
    f"model.layers.{{layer}}.{tensor}.weight": [param]
    for tensor, param in {
        "enorm": "predict_ahead.embedding_norm.scale",
        "hnorm": "predict_ahead.hidden_norm.scale",
        "eh_proj": "predict_ahead.projection.weight",
        "shared_head.norm": "predict_ahead.norm.scale",
        "embed_tokens": "embedding.weight",
        "shared_head.head": "head.weight",
    }.items()
}
DEEPSEEK_AHEAD = module_block(DEEPSEEK) | _DEEPSEEK_MODULE
GLM4_MOE_AHEAD = module_block(GLM4_MOE) | _DEEPSEEK_MODULE
# Qwen has one module, whose block has attention.
QWEN3_NEXT_AHEAD = module_block(_QWEN3_ATTENTION, "mtp.layers.0") | {
    "mtp.fc.weight": ["predict_ahead.projection.weight"],
    "mtp.pre_fc_norm_embedding.weight": ["predict_ahead.embedding_norm.scale"],
    "mtp.pre_fc_norm_hidden.weight": ["predict_ahead.hidden_norm.scale"],
    "mtp.norm.weight": ["predict_ahead.norm.scale"],
}
GPT_OSS = LLAMA | {
    "model.layers.{}.self_attn.sinks": ["layers.attention.sinks"],
    "model.layers.{}.mlp.router.*": ["layers.mlp.router.*"],
    "model.layers.{}.mlp.experts.gate_up_proj": ["layers.mlp.gate", "layers.mlp.up"],
    "model.layers.{}.mlp.experts.gate_up_proj_bias": [
        "layers.mlp.gate_bias",
        "layers.mlp.up_bias",
    ],
    "model.layers.{}.mlp.experts.down_proj": ["layers.mlp.down"],
    "model.layers.{}.mlp.experts.down_proj_bias": ["layers.mlp.down_bias"],
}
