"""The matrices that a parameter consists of."""

import math
from typing import NamedTuple

import jax

from model.params import ParamInfo


class MatrixDims(NamedTuple):
    """The dims of a parameter that index matrices, their inputs and their outputs."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of each matrix in an array."""
        fan_in = math.prod(shape[dim] for dim in self.inputs)
        return fan_in, math.prod(shape[dim] for dim in self.outputs)

    def to_stack(self, x: jax.Array) -> jax.Array:
        """Return a parameter, or a part of it, as [matrices, inputs, outputs]."""
        return x.transpose(self._order).reshape(-1, *self.fans(x.shape))

    def from_stack(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undo `to_stack`, and return an array of this shape."""
        order = self._order
        x = x.reshape([shape[dim] for dim in order])
        return x.transpose([order.index(dim) for dim in range(len(order))])

    @property
    def _order(self) -> tuple[int, ...]:
        return self.stack + self.inputs + self.outputs


def matrix_dims(info: ParamInfo, *, per_head: bool) -> MatrixDims:
    """Return which dims of a parameter index its matrices, inputs and outputs.

    With `per_head`, a parameter [embed, heads, head_dim] has a matrix [embed, head_dim]
    for each head. The output projection, whose inputs are heads, stays one matrix.
    """
    stack = tuple(range(info.stack_dims))
    inputs = tuple(range(info.stack_dims, info.output_start))
    outputs = tuple(range(info.output_start, len(info.axes)))
    output_axes = info.axes[info.output_start :]
    if per_head and output_axes in (("heads", "head_dim"), ("kv_heads", "head_dim")):
        stack = (*stack, outputs[0])
        outputs = outputs[1:]
    return MatrixDims(stack, inputs, outputs)
