"""Lay out the results of products on a device, and count their local FLOPs."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from train.plan.estimated.arrays import Dim, LocalArray, Position, ProductSize
from train.plan.estimated.collectives import CollectiveRecorder
from train.plan.estimated.layouts import ResultLayout


class LocalProduct(NamedTuple):
    """A matrix product on a device.

    operands: the operands, after their gathers.
    layout: the result's dims, and the axes along which it is a partial sum.
    size: None for an elementwise product and a sum.
    """

    operands: list[LocalArray]
    layout: ResultLayout
    size: ProductSize | None


def lay_out_product(
    a: LocalArray,
    b: LocalArray,
    pairs: Any,
    recorder: CollectiveRecorder,
    position: Position,
) -> LocalProduct:
    """Lay out `dot_general` on a device.

    A parameter is gathered along an axis that shards a contracted dim of it alone, or
    that shards both operands in dims that do not match.
    """
    (in_a, in_b), (batch_a, batch_b) = pairs
    matches = [*zip((*in_a, *batch_a), (*in_b, *batch_b), strict=True)]
    conflicts = []
    for axis in (*a.axes, *b.axes) if a.from_batch != b.from_batch else ():
        dim_a, dim_b = _dim_of(a, axis), _dim_of(b, axis)
        dim, contracted = (dim_b, in_b) if a.from_batch else (dim_a, in_a)
        if None in (dim_a, dim_b):
            is_conflict = dim in contracted
        else:
            is_conflict = (dim_a, dim_b) not in matches
        conflicts += [axis] * is_conflict
    if conflicts and a.from_batch:
        b = recorder.gather(b, tuple(conflicts), position)
    elif conflicts:
        a = recorder.gather(a, tuple(conflicts), position)
    contracted = [_join(a.dims[i], b.dims[j]) for i, j in zip(in_a, in_b, strict=True)]
    batch = [_join(a.dims[i], b.dims[j]) for i, j in zip(batch_a, batch_b, strict=True)]
    rows = [d for i, d in enumerate(a.dims) if i not in (*in_a, *batch_a)]
    columns = [d for i, d in enumerate(b.dims) if i not in (*in_b, *batch_b)]
    groups = (rows, columns, contracted, batch)
    size = ProductSize(*(math.prod(dim.size for dim in group) for group in groups))
    sum_axes = tuple(axis for dim in contracted for axis in dim.axes)
    layout = ((*batch, *rows, *columns), sum_axes)
    return LocalProduct([a, b], layout, size if rows or columns else None)


def _dim_of(array: LocalArray, axis: str) -> int | None:
    return next((i for i, dim in enumerate(array.dims) if axis in dim.axes), None)


def _join(a: Dim, b: Dim) -> Dim:
    """Return the known dim of a pair, or the smaller one; XLA slices the larger."""
    return min(a, b, key=lambda dim: (not dim.is_known, dim.size))


def lay_out_grouped_product(
    params: Any, operands: list[LocalArray]
) -> tuple[ResultLayout, ProductSize]:
    """Lay out a product of rows grouped by expert; each device has its own rows.

    The size includes rows that no expert uses.
    """
    rows, operand, sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), _ = numbers.dot_dimension_numbers
    num_rows, depth = (dim.size for dim in rows.dims)
    if numbers.rhs_group_dimensions:  # products with matrices [E, K, N] or [E, N, K]
        dims = rows.dims[0], operand.dims[3 - contracted[0]]
        size = ProductSize(num_rows, dims[1].size, depth)
    else:  # gradients of the matrices, [E, K, N]
        dims = sizes.dims[0], rows.dims[1], operand.dims[1]
        size = ProductSize(depth, dims[2].size, num_rows)
    return (dims, ()), size


def attention_flops(equation: Any, operands: list[LocalArray]) -> tuple[float, float]:
    """Count the local FLOPs of a traced attention kernel.

    The local numbers of rows and heads may differ from the traced numbers; the largest
    operand gives the ratio. The first two floating-point operands are queries and keys.

    Returns:
        The FLOPs for all scores, and the fraction of the scores in blocks that the mask
        does not skip. If the mask depends on the device, this is a causal mask's.
    """
    pairs = zip((v.aval for v in equation.invars), operands, strict=True)
    floats = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]
    traced, local = max(floats, key=lambda pair: pair[0].size)
    (queries, _), (keys, _), *_ = floats
    products = list(_products(equation.params["jaxpr"]))
    block = products[0]  # The first product computes a block of the scores.
    num_blocks = queries.shape[-2] * keys.shape[-2] / (block.rows * block.columns)
    heads = math.prod(queries.shape[:-2]) * local.size / traced.size
    whole = heads * num_blocks * sum(product.flops for product in products)
    masks = [array.value for array in operands if array.value is not None]
    if masks:  # the next blocks to load, and which blocks are computed
        return whole, np.count_nonzero(masks[1]) / num_blocks
    blocks_in_row = keys.shape[-2] / block.columns
    return whole, (blocks_in_row + 1) / (2 * blocks_in_row)


def _products(jaxpr: Any) -> Iterator[ProductSize]:
    """Yield the products of a kernel's body, including those in its loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[i] for i in inner)
            rows, columns = equation.outvars[0].aval.shape
            yield ProductSize(rows, columns, depth)
        for body in jaxprs_in_params(equation.params):
            yield from _products(body)
