"""What a layer keeps for its backward pass: what JAX itself says, from shapes alone.

One layer of one device's share is differentiated on abstract values. Nothing is lowered
or compiled; the same layer is looked at once in a process.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Literal, Var

from model.config import Attention, ModelConfig, Position
from model.gpt import rematerialized
from model.layers import Block, Execution, rotation


class Residual(NamedTuple):
    """An array that is kept."""

    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=256)
def kept(
    model: ModelConfig, how: Execution, rows: int, length: int, documents: bool
) -> tuple[Residual, ...]:
    """List what one layer of `model` keeps of [rows, length] tokens.

    That is what the layer's derivative closes over, each array once, but for its
    parameters and for what all layers share (angles, masks): the layer's own input with
    `remat=full`, the results of its products too with `dots`.
    """
    # cuDNN's kernel cannot be traced without cuDNN. It keeps what the plain products
    # keep, but a sum for each query instead of its scores.
    plain = how.attention is Attention.cudnn
    run = how._replace(attention=Attention.xla) if plain else how
    block = nnx.eval_shape(lambda: Block(model, nnx.Rngs(0)))
    graph, params = nnx.split(block)
    positions = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    ids = positions if documents else None
    x = jax.ShapeDtypeStruct((rows, length, model.embed_dim), how.activation_dtype)
    rotary = model.position is Position.rotary
    by = jax.eval_shape(lambda p: rotation(p, model), positions) if rotary else None

    def closed_over(x, params, by, ids):
        def layer(params, x):
            return nnx.merge(graph, params)(x, by, ids, run, None)[0]

        _, backward = jax.vjp(rematerialized(layer, how.remat, looped=True), params, x)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(closed_over)(x, params, by, ids).jaxpr
    made = _made_of(jaxpr, {jaxpr.invars[0]})
    results = dict.fromkeys(v for v in jaxpr.outvars if _is_in(v, made))
    avals: list[Any] = [v.aval for v in results]
    large = [aval for aval in avals if aval.size >= rows * length]
    found = [Residual(aval.shape, aval.dtype) for aval in large]
    if not plain:
        return tuple(found)
    square = [r for r in found if len(r.shape) == 5 and r.shape[-2:] == (length,) * 2]
    sums = Residual((rows, model.num_heads, length), jnp.dtype(jnp.float32))
    return tuple(r for r in found if r not in square) + (sums,) * bool(square)


def _made_of(jaxpr: Jaxpr, sources: set[Var]) -> set[Var]:
    """Find what follows from some of the arguments of a computation."""
    made = set(sources)
    for equation in jaxpr.eqns:
        given = [_is_in(v, made) for v in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"].jaxpr
            inside = _made_of(inner, set(itertools.compress(inner.invars, given)))
            results = zip(equation.outvars, inner.outvars, strict=True)
            made |= {v for v, of in results if _is_in(of, inside)}
        elif any(given):
            made.update(equation.outvars)
    return made


def _is_in(atom: Any, variables: set[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables
