"""The linear layer."""

import zlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.execution import NO_CONTEXT, CallContext, Execution
from model.params import Kind, ParamInfo
from model.products import expand_to, product
from model.scopes import part_scope
from model.taps import count_rounding


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
        """Draw the weight from N(0, std²). The bias starts at zero.

        `name` is the scope in traced programs, and `spec` is the einsum of `product`.
        `shape` is the weight's shape without padding, and `axes` are its logical axes.
        `padding` is the number of zeros that are appended along the last dim.
        """
        operands, result = spec.split("->")
        num_inputs = sum(letter not in result for letter in operands.split(",")[1])
        weight = std * jax.random.normal(rngs.params(), shape, dtype)
        if padding:
            weight = jnp.pad(weight, [(0, 0)] * (len(shape) - 1) + [(0, padding)])
        self.name = name
        self.spec = spec
        self.axes = axes
        self.weight = nnx.Param(weight, info=ParamInfo(axes, kind, num_inputs, padding))
        zeros = jnp.zeros(shape[num_inputs:], dtype)
        info = ParamInfo(axes[num_inputs:], Kind.vector)
        self.bias = nnx.Param(zeros, info=info) if bias else None

    def __call__(
        self,
        x: Float[Array, "..."],
        execution: Execution,
        call: CallContext = NO_CONTEXT,
    ) -> Float[Array, "..."]:
        """Return the layer's output for x [..., input dims], in x's dtype."""
        return self.add_bias(self.multiply(x, execution, call))

    def multiply(
        self,
        x: Float[Array, "..."],
        execution: Execution,
        call: CallContext = NO_CONTEXT,
    ) -> Float[Array, "..."]:
        """Return the product of x and the weight, without the bias."""
        numerics = execution.numerics
        quantization = None if call.high_precision else numerics.quantization
        with part_scope(self.name):
            call = call.fold_in(zlib.crc32(self.name.encode()))
            if call.taps and call.taps.watched and quantization is not None:
                x_rounded = x.astype(numerics.compute_dtype)
                x_quantized = quantization.round_left(self.spec, x_rounded)
                call.taps.note_rounding(count_rounding(x_rounded, x_quantized))
            # The product gathers the weight and reduce-scatters its gradient.
            return product(
                self.spec,
                x,
                self.weight[...],
                numerics.compute_dtype,
                placement=execution.weight_placement(self.axes),
                quantization=quantization,
                keys_BT=call.keys_BT,
            )

    def add_bias(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the product y plus the bias, if there is one."""
        if self.bias is None:
            return y
        with part_scope(self.name):
            return y + expand_to(self.bias[...], y.ndim).astype(y.dtype)
