"""Check that the parts that a user has added can be run, before anything is compiled.

Shapes: B batch, T time, D embed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data.errors import Mistake
from model.choices import Position
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.mixer_catalog import MIXERS, kinds_of
from model.mlp_kind import mlps_of
from model.rope import make_rotations
from train.config import TrainConfig
from train.core.loss.token_loss import TokenLoss
from train.errors import ConfigError
from train.losses.catalog import make_loss

_T = 8  # The number of positions in the row on which a part is tried.


def check_added_parts(model: ModelConfig, train: TrainConfig) -> None:
    """Try the added mixers, MLP and loss that a config chooses, on abstract arrays.

    Raises:
        ConfigError: a part lacks a method, fails, or returns another shape.
    """
    mistakes = list[Mistake]()

    def check(key: str, name: str, rule_of: Callable[[], str]) -> None:
        try:
            rule = rule_of()
        except Exception as error:
            line = str(error).partition("\n")[0]
            rule = f"cannot be run: {type(error).__name__}: {line}"
        if rule:
            mistakes.append(Mistake(key, name, rule))

    for name in dict.fromkeys(model.mixers):
        if name not in MIXERS:
            make = kinds_of(model)[name].make
            check("model.mixer", str(name), partial(_mixer_rule, make, model))
    if (mlp := mlps_of(model).get(model.mlp)) is not None:
        check("model.mlp", mlp.name, partial(_mlp_rule, mlp.make, model))
    check("train.loss", getattr(train, "loss", ""), partial(_loss_rule, train))
    if mistakes:
        raise ConfigError(mistakes)


def _mixer_rule(make: Callable[..., Any], config: ModelConfig) -> str:
    """Return the rule that a mixer breaks, for a row or for a position with a cache."""
    if not hasattr(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))), "empty_cache"):
        return "lacks the method empty_cache, which sampling needs"

    def run() -> tuple[jax.Array, jax.Array, Any]:
        mixer = make(config, nnx.Rngs(0))
        x_BTD = jnp.zeros((1, _T, config.embed_dim))
        y_BTD, _ = mixer(x_BTD, Execution(), _call(config, _T), None, False)
        cache = mixer.empty_cache(1, _T, jnp.float32, None)
        x_B1D = x_BTD[:, :1]
        y_B1D, cache = mixer(x_B1D, Execution(), _call(config, 1), cache, False)
        return y_BTD, y_B1D, cache

    y_BTD, y_B1D, cache = jax.eval_shape(run)
    if not hasattr(cache, "length"):
        return "returns no cache, although it was called with one"
    return _shape_rule(y_BTD, config, _T) or _shape_rule(y_B1D, config, 1)


def _mlp_rule(make: Callable[..., Any], config: ModelConfig) -> str:
    """Return the rule that an MLP breaks, or "" if there is none."""

    def run() -> jax.Array:
        x_BTD = jnp.zeros((1, _T, config.embed_dim))
        return make(config, nnx.Rngs(0))(x_BTD, Execution(), _call(config, _T))

    return _shape_rule(jax.eval_shape(run), config, _T)


def _loss_rule(train: TrainConfig) -> str:
    """Return the rule that a loss breaks, or "" if there is none."""
    loss = make_loss(train)
    if not isinstance(loss, TokenLoss):
        return "needs uses_mean_logit, sum and factors (TokenLoss in longhaul.losses)"
    try:
        hash(loss)
    except TypeError as error:
        return f"cannot be hashed ({error}); make it a frozen dataclass of plain values"
    return ""


def _call(config: ModelConfig, num_positions: int) -> CallContext:
    positions_BT = jnp.arange(num_positions, dtype=jnp.int32)[None]
    is_rotary = config.position is Position.rotary
    rotations = make_rotations(positions_BT, config) if is_rotary else None
    return CallContext(positions_BT=positions_BT, rotations=rotations)


def _shape_rule(y_BTD: Any, config: ModelConfig, length: int) -> str:
    shape = (1, length, config.embed_dim)
    if y_BTD.shape == shape:
        return ""
    return f"returns an array of shape {y_BTD.shape} for an input of shape {shape}"
