"""Adafactor: mean squares of a matrix are stored as means of its rows and columns.

optax's version factors the two largest dims of an array, even if one of them counts
layers or both belong to one head, and it limits and scales all layers together. Here
each matrix of a stack is updated by itself, and a matrix contains all heads, as in
Muon. The means have the parameter's rank, so that `state_shardings` in
train/resolve/sharding.py applies to them.

Source: Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with the constants of
section 9.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.params import ParamInfo, is_info
from train.config import OptimizerConfig
from train.core.optimizer.parts import RuleInputs, UpdateRule
from train.core.optimizer.rates import with_rates

_MIN_SQUARE = 1e-30
_MIN_SCALE = 1e-3
_MAX_UPDATE_RMS = 1.0
_DECAY_EXPONENT = 0.8  # the decay after t updates is 1 - t**-0.8


class Squares(NamedTuple):
    """The factored mean squares of a parameter [..., I, O].

    rows: the means over the output dims, which get size 1. For a vector, the mean
        square of each entry.
    columns: the means over the input dims, which get size 1; None for a vector.
    """

    rows: jax.Array
    columns: jax.Array | None


class AdafactorState(NamedTuple):
    """The number of updates, and a tree of `Squares`."""

    count: jax.Array
    squares: Any


def scale_by_adafactor(infos: Any) -> optax.GradientTransformation:
    """Return a transformation that divides gradients by factored root mean squares.

    The root mean square of the result is limited to 1. Then the result is multiplied by
    the parameter's root mean square, so that a learning rate means the same at any
    width. There is no momentum.
    """

    def init(params: Any) -> AdafactorState:
        squares = jax.tree.map(_zero_squares, infos, params, is_leaf=is_info)
        return AdafactorState(jnp.zeros((), jnp.int32), squares)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -_DECAY_EXPONENT
        squares = jax.tree.map(
            lambda info, grad, squares: _update_squares(info, grad, squares, decay),
            infos,
            updates,
            state.squares,
            is_leaf=is_info,
        )
        updates = jax.tree.map(
            _compute_direction, infos, updates, squares, params, is_leaf=is_info
        )
        return updates, AdafactorState(count, squares)

    return optax.GradientTransformation(init, update)


def _zero_squares(info: ParamInfo, param: jax.Array) -> Squares:
    output_start = info.output_start
    leading = param.shape[:output_start]
    outputs = param.shape[output_start:]
    rows = jnp.zeros((*leading, *(1 for _ in outputs)), jnp.float32)
    if not outputs:
        return Squares(rows, None)
    ones = (1,) * (output_start - info.stack_dims)
    return Squares(rows, jnp.zeros((*leading[: info.stack_dims], *ones, *outputs)))


def _update_squares(
    info: ParamInfo, grad: jax.Array, squares: Squares, decay: jax.Array
) -> Squares:
    """Return the running mean squares, updated by a gradient."""
    square = grad * grad + _MIN_SQUARE

    def update_mean(mean: jax.Array, start: int, stop: int) -> jax.Array:
        current = jnp.mean(square, tuple(range(start, stop)), keepdims=True)
        return decay * mean + (1 - decay) * current

    rows = update_mean(squares.rows, info.output_start, grad.ndim)
    if squares.columns is None:
        return Squares(rows, None)
    columns = update_mean(squares.columns, info.stack_dims, info.output_start)
    return Squares(rows, columns)


def _compute_direction(
    info: ParamInfo, grad: jax.Array, squares: Squares, param: jax.Array
) -> jax.Array:
    update = grad * jax.lax.rsqrt(squares.rows)
    if squares.columns is not None:
        inputs = tuple(range(info.stack_dims, info.output_start))
        mean = jnp.mean(squares.rows, inputs, keepdims=True)
        update *= jax.lax.rsqrt(squares.columns / mean)
    update /= jnp.maximum(1.0, _root_mean_square(info, update) / _MAX_UPDATE_RMS)
    return update * jnp.maximum(_root_mean_square(info, param), _MIN_SCALE)


def _root_mean_square(info: ParamInfo, x: jax.Array) -> jax.Array:
    """Return the root mean square of each matrix. Padding is zero and not counted."""
    dims = tuple(range(info.stack_dims, x.ndim))
    size = info.size(x.shape) // math.prod(x.shape[: info.stack_dims])
    return jnp.sqrt(jnp.sum(x * x, dims, keepdims=True) / size)


def make_adafactor(
    config: OptimizerConfig, inputs: RuleInputs
) -> optax.GradientTransformation:
    """Return Adafactor's transformation."""
    return with_rates(scale_by_adafactor(inputs.infos), inputs.rates)


ADAFACTOR = UpdateRule(make_adafactor)
