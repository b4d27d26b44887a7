"""Build small models of all families, and folders of their weights."""

import jax
import jax.numpy as jnp
from flax import nnx

from data.tokenizer import load_tokenizer
from model.catalog import MODEL_PARTS
from model.gpt import GPT, params_of
from model.params import named
from train.pretrained.families import family_of
from train.pretrained.folder import exported_settings
from train.pretrained.tensors import FamilyTensors
from train.pretrained.weights import write_json, write_weights
from train.run.folder import run_folder

BYTES = load_tokenizer("bytes")
LENGTH = 48
MODELS = {
    "llama": ("model=llama_nano",),
    "llama with biases, tied": (
        "model=llama_nano",
        "model.bias=true",
        "model.tied_head=true",
    ),
    "qwen3": ("model=qwen3_nano",),
    "llama 3.1": (
        "model=llama_nano",
        "model.rope_scaling.kind=llama3",
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "llama, yarn": (
        "model=llama_nano",
        "model.rope_scaling.kind=yarn",
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "mistral": ("model=mistral_nano", "model.window=7"),
    "qwen2": ("model=qwen2_nano",),
    "olmo2": ("model=olmo2_nano",),
    "olmo3": (
        *("model=olmo3_nano", "model.window=7", "model.layer_pattern=[local,global]"),
        *("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"),
        "model.rope_scaling.original_length=16",
    ),
    "gemma2": ("model=gemma2_nano", "model.window=7", "model.attention_soft_cap=2"),
    "gemma3": (
        *("model=gemma3_nano", "model.window=7", "model.layer_pattern=[local,global]"),
        *("model.rope_scaling.kind=linear", "model.rope_scaling.factor=4"),
    ),
    "deepseek v2": (
        *("model=deepseek_v2_nano", "model.rope_scaling.original_length=16"),
        *("model.rope_scaling.mscale=1.2", "model.embed_dim=32"),
        *("model.mlp_dim=48", "model.expert_dim=24"),
        "model.router_sequence_aux_weight=0",
    ),
    "deepseek v3": (
        *("model=deepseek_v3_nano", "model.rope_scaling.original_length=16"),
        *("model.rope_scaling.mscale_all_dim=0.6", "model.embed_dim=32"),
        *("model.mlp_dim=48", "model.expert_dim=24", "model.experts_per_token=6"),
        *("model.router_groups_kept=3", "model.router_sequence_aux_weight=0"),
    ),
    "mixtral": ("model=mixtral_nano", "model.embed_dim=32", "model.window=7"),
    "qwen3 with experts": (
        *("model=mixtral_nano", "model.embed_dim=32", "model.qk_norm=true"),
        "model.router_normalized=false",
    ),
    "qwen3-next": (
        *("model=qwen3_next_nano", "model.mixer_pattern=[gated_delta,attention]"),
        *("model.embed_dim=32", "model.head_dim=16", "model.expert_dim=24"),
        *("model.delta_key_dim=8", "model.delta_value_dim=6"),
        *("model.delta_value_heads=6", "model.experts_every=2", "model.mlp_dim=40"),
    ),
    "qwen3.5": (
        *("model=qwen3_next_nano", "model.mixer_pattern=[gated_delta,attention]"),
        *("model.embed_dim=32", "model.head_dim=16", "model.expert_dim=24"),
        *("model.delta_key_dim=8", "model.delta_value_dim=6"),
        *("model.delta_key_heads=4", "model.delta_value_heads=4"),
        "model.shared_experts=2",
    ),
    "gpt-oss": (
        *("model=gpt_oss_nano", "model.embed_dim=32", "model.window=7"),
        *("model.expert_dim=24", "model.swiglu_limit=0.5"),
        *("model.rope_scaling.kind=yarn", "model.rope_scaling.truncate=false"),
        *("model.rope_scaling.factor=4", "model.rope_scaling.original_length=16"),
    ),
    "glm 4.5": (
        *("model=glm_4_5_nano", "model.embed_dim=32", "model.mlp_dim=48"),
        *("model.expert_dim=24", "model.num_experts=8", "model.rotary_fraction=0.5"),
    ),
    "glm 4.5, one group": (
        *("model=glm_4_5_nano", "model.embed_dim=32", "model.mlp_dim=48"),
        *("model.router_groups=1", "model.router_groups_kept=1"),
        *("model.qk_norm=true", "model.qkv_bias=false", "model.shared_experts=2"),
        *("model.router_bias_rate=0", "model.router_normalized=false"),
    ),
    "gpt2": ("model=gpt2_nano", "model.max_sequence_length=48"),
    "gpt2 without biases, untied": (
        "model=gpt2_nano",
        "model.max_sequence_length=48",
        "model.bias=false",
        "model.tied_head=false",
    ),
}

# An earlier family could hold these models too, so that their family is named.
FAMILY_NAMES = {"qwen3.5": "qwen3_5_moe_text"}


def perturbed(model, scale=0.1, seed=0):
    """Return parameters of a model that all differ from their initial values."""
    params = params_of(GPT(model, nnx.Rngs(seed), MODEL_PARTS))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    return jax.tree.map(
        lambda x: x + scale * jax.random.normal(next(keys), x.shape, x.dtype), params
    )


def export(folder, program, params, dtype="float32", family=None):
    """Write weights and settings to a folder, and describe its tensors."""
    family = family_of(program.config.model, family)
    parts = FamilyTensors(family, program.config.model, program.infos, BYTES.n_vocab)
    output = run_folder(str(folder))
    write_weights(output, parts, dict(named(params)), jnp.dtype(dtype))
    settings = exported_settings(family, program.config.model, BYTES, LENGTH, dtype)
    write_json(output / "config.json", settings)
    return parts
