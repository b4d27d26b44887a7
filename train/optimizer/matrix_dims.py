"""The matrices that a parameter consists of."""

import math
from typing import NamedTuple

import jax

from model.params import ParamInfo


class MatrixDims(NamedTuple):
    """The dims of a parameter that count its matrices, their inputs and outputs."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a matrix."""
        fan_in = math.prod(shape[dim] for dim in self.inputs)
        return fan_in, math.prod(shape[dim] for dim in self.outputs)

    def to_stack(self, x: jax.Array) -> jax.Array:
        """Return a parameter, or a part of it, as [matrices, inputs, outputs]."""
        return x.transpose(self._order).reshape(-1, *self.fans(x.shape))

    def from_stack(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return an array of this shape from [matrices, inputs, outputs]."""
        order = self._order
        x = x.reshape([shape[dim] for dim in order])
        return x.transpose([order.index(dim) for dim in range(len(order))])

    @property
    def _order(self) -> tuple[int, ...]:
        return self.stack + self.inputs + self.outputs


def matrix_dims(info: ParamInfo, *, per_head: bool) -> MatrixDims:
    """Return the dims of the matrices of a parameter.

    With `per_head`, a matrix [embed, heads, head_dim] is one [embed, head_dim] for each
    head. Heads that are inputs, those of the output projection, stay in one matrix.
    """
    stack = tuple(range(info.stack_dims))
    inputs = tuple(range(info.stack_dims, info.output_start))
    outputs = tuple(range(info.output_start, len(info.axes)))
    output_axes = info.axes[info.output_start :]
    if per_head and output_axes in (("heads", "head_dim"), ("kv_heads", "head_dim")):
        stack, outputs = (*stack, outputs[0]), outputs[1:]
    return MatrixDims(stack, inputs, outputs)
