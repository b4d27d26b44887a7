"""The one way to multiply: every product with a weight, or between activations.

Operands are rounded to the compute dtype, products accumulate in float32, and the
backward pass rounds the cotangent too, so that all three products of a linear layer
run on the machine's fast units. Plain `x @ w` does neither: with bfloat16 operands
XLA's CPU upcasts them, and a float32 cotangent drops a GPU's backward pass to TF32
(docs/log.md has the figures). Nothing is flattened or transposed on the way: einsums
with the weight's own dims are the form that XLA's CPU is fast on.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.execution import Execution
from model.gather import WHOLE, Parts, parts_of
from model.params import Kind, ParamInfo
from model.parts import part


def product(
    spec: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    compute: DTypeLike,
    parts: Parts = WHOLE,
) -> Float[Array, "..."]:
    """Contract two arrays by an einsum of the form "ab,bc->ac", differentiably.

    Every letter of an operand must stand in the other operand or in the result. The
    result has a's dtype, each gradient has its operand's. `parts` tells of b.
    """
    return _product(spec, a, b, compute, parts)  # pyright: ignore[reportReturnType]


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _product(
    spec: str, a: jax.Array, b: jax.Array, compute: DTypeLike, parts: Parts
) -> jax.Array:
    return _einsum(spec, a, parts.gather(b.astype(compute)), compute, a.dtype)


def _einsum(
    spec: str, a: jax.Array, b: jax.Array, compute: DTypeLike, out: DTypeLike
) -> jax.Array:
    return jnp.einsum(
        spec, a.astype(compute), b.astype(compute), preferred_element_type=out
    )


def _forward(spec: str, a: jax.Array, b: jax.Array, compute: DTypeLike, parts: Parts):
    # Only the rounded a is kept: it is what the backward pass needs. b is mostly a
    # parameter, alive anyway, and rounding it again is cheaper than keeping both. What
    # was gathered is kept where all of a layer is recomputed: it lives that long.
    a_rounded = a.astype(compute)
    whole = parts.gather(b.astype(compute)) if parts.cut else b
    y = _einsum(spec, a_rounded, whole, compute, a.dtype)
    kept = b if parts.gather_again else whole
    return y, (a_rounded, kept, jnp.zeros((), a.dtype), jnp.zeros((), b.dtype))


def _backward(spec: str, compute: DTypeLike, parts: Parts, residuals, dy: jax.Array):
    a, b, like_a, like_b = residuals
    if parts.gather_again:
        b = parts.gather(b.astype(compute))
    operands, result = spec.split("->")
    left, right = operands.split(",")
    dy = dy.astype(compute)
    da = _einsum(f"{result},{right}->{left}", dy, b, compute, like_a.dtype)
    db = _einsum(f"{left},{result}->{right}", a, dy, compute, like_b.dtype)
    return da, parts.scatter(db)


_product.defvjp(_forward, _backward)


def leading(x: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """Return x with dims of size 1 in front, `ndim` in all."""
    return jnp.expand_dims(x, range(ndim - x.ndim))


class Linear(nnx.Module):
    """A weight, its einsum, and an optional bias over the output dims."""

    def __init__(
        self,
        name: str,
        spec: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        std: float,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        kind: Kind = Kind.matrix,
        padding: int = 0,
    ):
        """Draw the weight from N(0, std²).

        Args:
            name: in traced programs.
            spec: the einsum, as `product` takes it.
            shape: of the weight.
            axes: its logical axes.
            std: of the initial values.
            bias: whether to add one, zero at first.
            dtype: of the parameters.
            rngs: to draw from.
            kind: how optimizers see the weight.
            padding: zeros to add behind its last dim.
        """
        operands, result = spec.split("->")
        inputs = sum(letter not in result for letter in operands.split(",")[1])
        weight = std * jax.random.normal(rngs.params(), shape, dtype)
        if padding:
            weight = jnp.pad(weight, [(0, 0)] * (len(shape) - 1) + [(0, padding)])
        self.name, self.spec, self.axes = name, spec, axes
        self.weight = nnx.Param(weight, info=ParamInfo(axes, kind, inputs, padding))
        zeros = jnp.zeros(shape[inputs:], dtype)
        info = ParamInfo(axes[inputs:], Kind.vector)
        self.bias = nnx.Param(zeros, info=info) if bias else None

    def __call__(self, x: Float[Array, "..."], how: Execution) -> Float[Array, "..."]:
        """Apply to x [..., input dims]; the result has x's dtype."""
        with part(self.name):
            parts = parts_of(self.axes, how)
            y = product(self.spec, x, self.weight[...], how.compute_dtype, parts)
            if self.bias is None:
                return y
            return y + leading(self.bias[...], y.ndim).astype(y.dtype)
