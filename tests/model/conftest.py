"""These tiny models together use every choice that a model has."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.catalog import MODEL_PARTS
from model.choices import (
    Activation,
    Init,
    Mlp,
    Norm,
    NormPlacement,
    NormSpan,
    Position,
    Scores,
    TokenShift,
)
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import abstract_gpt, bind, params_of

TINY = {
    "gpt2": ModelConfig(
        num_layers=2,
        num_heads=2,
        embed_dim=16,
        vocab_size=32,
        max_sequence_length=16,
        norm=Norm.layernorm,
        position=Position.learned,
        activation=Activation.gelu,
        tied_head=True,
        bias=True,
        init=Init.gpt2,
    ),
    "llama": ModelConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        mlp_dim=40,
        vocab_size=32,
        activation=Activation.swiglu,
    ),
    "nano": ModelConfig(
        num_layers=2,
        num_heads=2,
        embed_dim=16,
        head_dim=12,
        vocab_size=32,
        rotary_fraction=0.5,
        activation=Activation.relu2,
        qk_norm=True,
        attention_gate=True,
        token_shift=TokenShift.both,
        logit_soft_cap=2.0,
        layer_unroll=-1,
    ),
    "gemma": ModelConfig(
        num_layers=3,
        num_heads=2,
        embed_dim=16,
        vocab_size=32,
        window=3,
        layer_pattern=("local", "global"),
        attention_soft_cap=2.0,
        attention_sinks=True,
        norm_placement=NormPlacement.both,
        norm_unit_offset=True,
        rope_theta_local=100.0,
        query_scale_dim=3,
        activation=Activation.geglu,
        qk_norm=True,
        qk_norm_over=NormSpan.projection,
        qkv_bias=True,
        scaled_embedding=True,
        tied_head=True,
    ),
    "latent": ModelConfig(
        num_layers=2,
        num_heads=3,
        embed_dim=16,
        mlp_dim=20,
        vocab_size=32,
        mixer="latent_attention",
        query_rank=14,
        kv_rank=12,
        nope_head_dim=6,
        rope_head_dim=4,
        value_head_dim=7,
        norm_epsilon=1e-2,
    ),
    "hybrid": ModelConfig(
        num_layers=4,
        embed_dim=16,
        mlp_dim=24,
        vocab_size=32,
        mixer_pattern=("gated_delta", "attention"),
        attention_gate=True,
        token_shift=TokenShift.attention,
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=6,
        delta_value_dim=5,
        norm_unit_offset=True,
    ),
    "moe": ModelConfig(
        num_layers=7,
        num_heads=2,
        embed_dim=16,
        vocab_size=32,
        mlp=Mlp.moe,
        num_experts=4,
        expert_dim=12,
        shared_experts=1,
        dense_layers=1,
        experts_every=3,
        window=4,
        layer_pattern=("local", "global", "global"),
        router=Scores.sigmoid,
        router_bias_rate=0.1,
        activation=Activation.clamped_swiglu,
        token_shift=TokenShift.mlp,
        swiglu_limit=0.4,
        bias=True,
    ),
}


class Tiny:
    """A tiny model with random parameters, its functions compiled once."""

    def __init__(self, name: str):
        self.name = name
        self.config = TINY[name]
        self.execution = Execution(layer_unroll=self.config.layer_unroll or 1)
        self.model = abstract_gpt(self.config, MODEL_PARTS)

    @cached_property
    def params(self) -> Any:
        """Return random parameters, none zero or one, so that each has an effect.

        The model's own initialisation would take longer to compile than most tests.
        """
        rng = np.random.default_rng(1)

        def draw(path: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
            scale = "scale" in str(path) and not self.config.norm_unit_offset
            mean = 1.0 if scale else 0.0
            return jnp.asarray(
                mean + 0.3 * rng.normal(size=abstract.shape), abstract.dtype
            )

        # A test may ask for them first in a function that is traced.
        with jax.ensure_compile_time_eval():
            return jax.tree_util.tree_map_with_path(draw, params_of(self.model))

    @cached_property
    def logits(self):
        """Return the jitted (params, tokens, positions, segment ids) -> logits."""

        def logits(params, tokens, positions, segment_ids):
            model = bind(self.model, params)
            x, *_ = model.features(tokens, positions, segment_ids, self.execution)
            return model.logits(x, self.execution)

        return jax.jit(logits)

    @cached_property
    def value_and_grad(self):
        """Return the jitted (params, tokens) -> loss and its gradients."""
        return jax.jit(jax.value_and_grad(self.loss))

    def loss(self, params, tokens, execution: Execution | None = None) -> jax.Array:
        """Return the mean cross-entropy of each token given the previous tokens."""
        execution = execution or self.execution
        model = bind(self.model, params)
        inputs = tokens[:, :-1]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        x, *_ = model.features(inputs, positions, None, execution)
        logp = jax.nn.log_softmax(model.logits(x, execution))
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], -1))

    def tokens(self, *shape: int) -> jax.Array:
        """Draw the same token ids at every call."""
        size = self.config.vocab_size
        rng = np.random.default_rng(0)
        return jnp.asarray(rng.integers(size, size=shape, dtype=np.int32))


MODELS = {name: Tiny(name) for name in TINY}


@pytest.fixture(params=list(MODELS))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return MODELS[request.param]


@pytest.fixture
def llama() -> Tiny:
    return MODELS["llama"]
