"""Lay out the results of products on a device, and count their local FLOPs."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from train.plan.cost import causal_blocks, computed_blocks, expected_fraction
from train.plan.estimated.arrays import Dim, LocalArray, OperationPosition, gather_along
from train.plan.estimated.collectives import CollectiveRecorder
from train.plan.estimated.layouts import ResultLayout


def lay_out_product(
    a: LocalArray,
    b: LocalArray,
    pairs: Any,
    recorder: CollectiveRecorder,
    position: OperationPosition,
) -> tuple[LocalArray, LocalArray, ResultLayout, float]:
    """Lay out `dot_general` on a device.

    An axis conflicts if it shards both operands in dims that do not match, or only a
    contracted dim of one operand. Then the parameter is gathered along this axis. Of
    two parameters, the one whose contracted dim is sharded is gathered; if that is true
    of both or neither, the smaller one.

    Returns:
        The operands of the local product; the result's dims with the axes along which
        it is a partial sum; and the FLOPs.
    """
    (in_a, in_b), (batch_a, batch_b) = pairs
    matches = dict(zip((*in_a, *batch_a), (*in_b, *batch_b), strict=True))
    for axis in dict.fromkeys((*a.axes, *b.axes)):
        dim_a, dim_b = _dim_of(a, axis), _dim_of(b, axis)
        both = dim_a is not None and dim_b is not None
        if both and matches.get(dim_a) == dim_b:
            continue
        to_gather = None
        if a.from_batch != b.from_batch:
            weight, dim, inner = (b, dim_b, in_b) if a.from_batch else (a, dim_a, in_a)
            to_gather = weight if dim is not None and (both or dim in inner) else None
        elif both and not a.from_batch:
            to_gather = min(b, a, key=lambda array: array.bytes)
            if (dim_a in in_a) != (dim_b in in_b):
                to_gather = a if dim_a in in_a else b
        if to_gather is not None:
            recorder.gather(to_gather, (axis,), position)
            gathered = gather_along(to_gather, (axis,), recorder.sizes)
            a, b = (gathered, b) if to_gather is a else (a, gathered)
    contracted = [_join(a.dims[i], b.dims[j]) for i, j in zip(in_a, in_b, strict=True)]
    batch = [_join(a.dims[i], b.dims[j]) for i, j in zip(batch_a, batch_b, strict=True)]
    free_a = [d for i, d in enumerate(a.dims) if i not in (*in_a, *batch_a)]
    free_b = [d for i, d in enumerate(b.dims) if i not in (*in_b, *batch_b)]
    flops = 2.0 * math.prod(d.size for d in (*contracted, *batch, *free_a, *free_b))
    if not free_a and not free_b:
        flops = 0.0  # an elementwise product and a sum, not a matrix product
    sum_axes = tuple(axis for dim in contracted for axis in dim.axes)
    return a, b, ((*batch, *free_a, *free_b), sum_axes), flops


def _dim_of(array: LocalArray, axis: str) -> int | None:
    return next((i for i, dim in enumerate(array.dims) if axis in dim.axes), None)


def _join(a: Dim, b: Dim) -> Dim:
    """Return the known dim of a pair, or the smaller one; XLA slices the larger."""
    if not (a.is_known and b.is_known):
        return a if a.is_known else b
    return min(a, b, key=lambda dim: dim.size)


def lay_out_grouped_product(
    params: Any, operands: list[LocalArray], scope: str
) -> tuple[ResultLayout, float]:
    """Lay out a product of rows grouped by expert.

    Returns:
        The result's dims, no axes of a partial sum (each device has its own rows), and
        the FLOPs of the expected number of rows in use.
    """
    rows, operand, sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), _ = numbers.dot_dimension_numbers
    if numbers.rhs_group_dimensions:  # products with matrices [E, K, N] or [E, N, K]
        dims = rows.dims[0], operand.dims[3 - contracted[0]]
    else:  # gradients of the matrices, [E, K, N]
        dims = sizes.dims[0], rows.dims[1], operand.dims[1]
    flops = 2.0 * rows.size * dims[-1].size
    return (dims, ()), flops * expected_fraction(scope)


class KernelFlops(NamedTuple):
    """The FLOPs of an attention kernel on a device, including skipped blocks.

    computed_fraction: the fraction of `flops` in blocks that the mask does not skip.
    is_square: whether there are as many keys as queries.
    """

    flops: float
    computed_fraction: float
    is_square: bool


def traced_attention_flops(
    equation: Any, operands: list[LocalArray], scope: str
) -> KernelFlops:
    """Count the local FLOPs of a traced kernel.

    Each cell of the grid executes the products of the kernel's body. The local numbers
    of rows and heads may differ from the traced numbers; the largest operand gives
    the ratio. The first two floating-point operands are queries and keys.
    """
    params = equation.params
    cells = math.prod(params["grid_mapping"].grid)
    pairs = zip((v.aval for v in equation.invars), operands, strict=True)
    floats = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]
    traced, local = max(floats, key=lambda pair: pair[0].size)
    flops = cells * _jaxpr_flops(params["jaxpr"]) * local.size / traced.size
    lengths = [array.dims[-2].size for _, array in floats[:2] if len(array.dims) > 1]
    is_square = len({*lengths}) == 1
    masks = [v.aval.shape[-2:] for v in equation.invars if v.aval.dtype == np.int8]
    if not masks:
        return KernelFlops(flops, 1.0, is_square)
    computed, blocks = computed_blocks(scope) or causal_blocks(masks[0])
    # The grid has one cell for each block of the mask; count all blocks of the scores.
    flops *= blocks / math.prod(masks[0])
    return KernelFlops(flops, computed / blocks, is_square)


def _jaxpr_flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[i] for i in inner)
            total += 2.0 * equation.outvars[0].aval.size * depth
        trips = equation.params.get("length", 1)
        total += trips * sum(map(_jaxpr_flops, jaxprs_in_params(equation.params)))
    return total
