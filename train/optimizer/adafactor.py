"""Adafactor: of each matrix' mean square only the means of rows and columns are kept.

optax has it too, for arrays of which it factors the two largest dims, layers' or a
head's among them, and of which all layers share a limit and a scale. Here a stack is
its matrices one by one, heads are part of a matrix as they are to Muon, and what is
kept has the parameter's rank, so that `state_shardings` lays it out.

Source: Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with the constants of
section 9.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.params import ParamInfo, is_info

_LEAST_SQUARE, _LEAST_SCALE = 1e-30, 1e-3
_LIMIT = 1.0  # the largest root mean square of an update
_EXPONENT = 0.8  # the decay is 1 - t**-0.8


class Factored(NamedTuple):
    """The mean squares of a parameter [..., I, O].

    rows: their means over outputs, whose dims are 1; of a vector all of them.
    columns: their means over inputs, whose dims are 1; None of vectors.
    """

    rows: jax.Array
    columns: jax.Array | None


class AdafactorState(NamedTuple):
    """The number of updates, and a tree of `Factored`."""

    count: jax.Array
    squares: Any


def scale_by_adafactor(infos: Any) -> optax.GradientTransformation:
    """Divide gradients by factored root mean squares, limit and scale the result.

    Without momentum. The step is relative: times the root mean square of the
    parameter, so a learning rate means the same at any width.

    Args:
        infos: tree of `ParamInfo`.
    """

    def init(params: Any) -> AdafactorState:
        start = jax.tree.map(_empty, infos, params, is_leaf=is_info)
        return AdafactorState(jnp.zeros((), jnp.int32), start)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -_EXPONENT

        def follow(info: ParamInfo, grad: jax.Array, old: Factored) -> Factored:
            return _followed(info, grad, old, decay)

        squares = jax.tree.map(follow, infos, updates, state.squares, is_leaf=is_info)
        updates = jax.tree.map(
            _direction, infos, updates, squares, params, is_leaf=is_info
        )
        return updates, AdafactorState(count, squares)

    return optax.GradientTransformation(init, update)


def _empty(info: ParamInfo, param: jax.Array) -> Factored:
    inputs, outputs = param.shape[: info.split], param.shape[info.split :]
    rows = jnp.zeros((*inputs, *(1 for _ in outputs)), jnp.float32)
    if not outputs:
        return Factored(rows, None)
    ones = (1,) * (info.split - info.stack)
    return Factored(rows, jnp.zeros((*inputs[: info.stack], *ones, *outputs)))


def _followed(
    info: ParamInfo, grad: jax.Array, old: Factored, decay: jax.Array
) -> Factored:
    """Return the mean squares after one more gradient."""
    squares, first, split = grad * grad + _LEAST_SQUARE, info.stack, info.split

    def mean(old: jax.Array, start: int, stop: int) -> jax.Array:
        new = jnp.mean(squares, tuple(range(start, stop)), keepdims=True)
        return decay * old + (1 - decay) * new

    rows = mean(old.rows, split, grad.ndim)
    columns = None if old.columns is None else mean(old.columns, first, split)
    return Factored(rows, columns)


def _direction(
    info: ParamInfo, grad: jax.Array, squares: Factored, param: jax.Array
) -> jax.Array:
    update = grad * jax.lax.rsqrt(squares.rows)
    if squares.columns is not None:
        inputs = tuple(range(info.stack, info.split))
        mean = jnp.mean(squares.rows, inputs, keepdims=True)
        update *= jax.lax.rsqrt(squares.columns / mean)
    update /= jnp.maximum(1.0, _root_mean_square(info, update) / _LIMIT)
    return update * jnp.maximum(_root_mean_square(info, param), _LEAST_SCALE)


def _root_mean_square(info: ParamInfo, x: jax.Array) -> jax.Array:
    """Return the root mean square of each matrix, whose padding is zero."""
    dims = tuple(range(info.stack, x.ndim))
    size = info.size(x.shape) // math.prod(x.shape[: info.stack])
    return jnp.sqrt(jnp.sum(x * x, dims, keepdims=True) / size)
