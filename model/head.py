"""The head, which projects features to logits.

Shapes: B batch, T time, D embed, V vocab.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model.choices import Init
from model.config import ModelConfig
from model.execution import Execution
from model.layers import stds
from model.linear import Linear
from model.params import Kind
from model.products import product

_HEAD = "btd,dv->btv"


def head_spec(config: ModelConfig) -> str:
    """Return the einsum of features and the head's weight."""
    return "btd,vd->btv" if config.tied_head else _HEAD


def project(
    x_BTD: Float[Array, "B T D"],
    weight: Float[Array, "in out"],
    config: ModelConfig,
    execution: Execution,
) -> Float[Array, "B T V"]:
    """Return float32 logits [B, T, vocab_rows], including the logits of padding."""
    compute = execution.numerics.compute_dtype
    logits_BTV = product(head_spec(config), x_BTD.astype(jnp.float32), weight, compute)
    logits_BTV = execution.placement.constrain(logits_BTV, "batch", "seq", "vocab")
    cap = config.logit_soft_cap
    return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)


def make_head(config: ModelConfig, rngs: nnx.Rngs) -> Linear:
    """Return the untied projection from features to logits."""
    assert config.vocab_size is not None
    return Linear(
        "head",
        _HEAD,
        (config.embed_dim, config.vocab_size),
        ("embed", "vocab"),
        std=0.0 if config.init is Init.zero else stds(config, config.embed_dim)[0],
        bias=False,
        dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
        kind=Kind.table,
        padding=config.vocab_rows - config.vocab_size,
    )
