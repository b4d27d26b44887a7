"""The families of models that others know, by the switches of ours that make them.

Sources: transformers 5.23, models/{gpt2,llama,qwen3}/modeling_*.py and
configuration_*.py, for names, layouts and settings. Our rotary pairs (i, i + P) are
those of transformers, so no dim is permuted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from model.choices import Activation, Mlp, Norm, Position
from model.config import ModelConfig
from train.errors import ConfigError, Mistake

_ROTARY = {
    "norm": Norm.rmsnorm,
    "position": Position.rotary,
    "rotary_fraction": 1.0,
    "activation": Activation.swiglu,
    "mlp": Mlp.dense,
    "logit_soft_cap": None,
}
_LEARNED = {
    "norm": Norm.layernorm,
    "position": Position.learned,
    "activation": Activation.gelu,
    "mlp": Mlp.dense,
    "qk_norm": False,
    "logit_soft_cap": None,
}
_LLAMA = {
    "model.embed_tokens.weight": ["embedding.weight"],
    "model.layers.{}.input_layernorm.weight": ["layers.attention_norm.scale"],
    "model.layers.{}.self_attn.q_proj": ["layers.attention.query"],
    "model.layers.{}.self_attn.k_proj": ["layers.attention.key"],
    "model.layers.{}.self_attn.v_proj": ["layers.attention.value"],
    "model.layers.{}.self_attn.q_norm.weight": ["layers.attention.query_norm.scale"],
    "model.layers.{}.self_attn.k_norm.weight": ["layers.attention.key_norm.scale"],
    "model.layers.{}.self_attn.o_proj": ["layers.attention.output"],
    "model.layers.{}.post_attention_layernorm.weight": ["layers.mlp_norm.scale"],
    "model.layers.{}.mlp.gate_proj": ["layers.mlp.gate"],
    "model.layers.{}.mlp.up_proj": ["layers.mlp.up"],
    "model.layers.{}.mlp.down_proj": ["layers.mlp.down"],
    "model.norm.weight": ["norm.scale"],
    "lm_head.weight": ["head.weight"],
}
_GPT2 = {
    "transformer.wte.weight": ["embedding.weight"],
    "transformer.wpe.weight": ["positions.weight"],
    "transformer.h.{}.ln_1.weight": ["layers.attention_norm.scale"],
    "transformer.h.{}.ln_1.bias": ["layers.attention_norm.bias"],
    "transformer.h.{}.attn.c_attn": [
        f"layers.attention.{name}" for name in ("query", "key", "value")
    ],
    "transformer.h.{}.attn.c_proj": ["layers.attention.output"],
    "transformer.h.{}.ln_2.weight": ["layers.mlp_norm.scale"],
    "transformer.h.{}.ln_2.bias": ["layers.mlp_norm.bias"],
    "transformer.h.{}.mlp.c_fc": ["layers.mlp.up"],
    "transformer.h.{}.mlp.c_proj": ["layers.mlp.down"],
    "transformer.ln_f.weight": ["norm.scale"],
    "transformer.ln_f.bias": ["norm.bias"],
    "lm_head.weight": ["head.weight"],
}


def _llama(model: ModelConfig) -> dict[str, Any]:
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
        "attention_dropout": 0.0,
        # Version 5 of transformers reads the first, version 4 the other two.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
    }


def _qwen3(model: ModelConfig) -> dict[str, Any]:
    settings = _llama(model)
    del settings["mlp_bias"]
    return settings | {"use_sliding_window": False}


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.embed_dim,
        "n_inner": model.mlp_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


class Family(NamedTuple):
    """A family of models.

    name: `model_type` of transformers.
    architecture: its class there.
    needs: fields of `ModelConfig`, and what they must be.
    names: of tensors, {} being the layer's number, and the parameters that lie in each
        side by side; a name without ending stands for a weight and a bias.
    turned: matrices lie as [outputs, inputs].
    biased: it is GPT-2's kind: with biases, which are zeros where our model has none,
        and as many key and value heads as query heads, all of the usual size.
    length: what it calls the longest row.
    settings: of config.json.
    """

    name: str
    architecture: str
    needs: dict[str, Any]
    names: dict[str, list[str]]
    turned: bool
    biased: bool
    length: str
    settings: Callable[[ModelConfig], dict[str, Any]]

    def mistakes(self, model: ModelConfig) -> list[Mistake]:
        """List what a model of this family cannot be."""
        needs = dict(self.needs)
        if self.biased:
            needs |= {"num_kv_heads": model.num_heads}
            needs |= {"head_dim": model.embed_dim // model.num_heads}
        have = {field: getattr(model, field) for field in needs}
        have |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
        rule = "must be {} for transformers' {}, the family that fits best; a model "
        rule += "that no family can hold stays in the run's checkpoints"
        return [
            Mistake(
                f"model.{field}",
                have[field],
                rule.format("null" if value is None else value, self.name),
            )
            for field, value in needs.items()
            if have[field] != value
        ]

    def tensors(self) -> dict[str, list[str]]:
        """Return the parameters that lie side by side in each tensor, by its name."""
        names = dict[str, list[str]]()
        for name, params in self.names.items():
            whole = name.endswith((".weight", ".bias"))
            for end in ("",) if whole else (".weight", ".bias"):
                names[name + end] = [param + end for param in params]
        return names


FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _ROTARY | {"qk_norm": False},
        _LLAMA,
        turned=True,
        biased=False,
        length="max_position_embeddings",
        settings=_llama,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _ROTARY | {"qk_norm": True, "bias": False},
        _LLAMA,
        turned=True,
        biased=False,
        length="max_position_embeddings",
        settings=_qwen3,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _LEARNED,
        _GPT2,
        turned=False,
        biased=True,
        length="n_positions",
        settings=_gpt2,
    ),
)


def family_of(model: ModelConfig) -> Family:
    """Return the family that a model belongs to.

    Raises:
        ConfigError: if there is none, with all that keeps it from the nearest.
    """
    mistakes = [family.mistakes(model) for family in FAMILIES]
    nearest = min(mistakes, key=len)
    if nearest:
        raise ConfigError(nearest)
    return FAMILIES[mistakes.index(nearest)]
