"""Lay out the results of equations: find their local dims, and count their FLOPs."""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from train.plan.estimated.arrays import (
    Axes,
    Dim,
    LocalArray,
    Work,
    broadcast_dims,
    product_work,
    reshape_dims,
)
from train.plan.estimated.collectives import COLLECTIVES, CollectiveRecorder

ResultLayout = tuple[tuple[Dim, ...], Axes]  # dims, and the axes of a partial sum


def lay_out_results(
    equation: Any, operands: list[LocalArray], recorder: CollectiveRecorder
) -> list[ResultLayout]:
    """Return each result's dims, and the axes along which it is a partial sum."""
    params = equation.params
    in_shapes = [v.aval.shape for v in equation.invars]
    out_shapes = [v.aval.shape for v in equation.outvars]
    first_dims = operands[0].dims if operands else tuple[Dim, ...]()
    removed = ()
    match equation.primitive.name:
        case name if name in COLLECTIVES:
            return [(dims, ()) for dims in recorder.exchange(name, params, operands)]
        case "transpose":
            return [(tuple(first_dims[i] for i in params["permutation"]), ())]
        case "reshape":
            return [(reshape_dims(first_dims, in_shapes[0], out_shapes[0]), ())]
        case "broadcast_in_dim":
            dims = [Dim(size, (), False) for size in out_shapes[0]]
            for i, to in enumerate(params["broadcast_dimensions"]):
                if in_shapes[0][i] == out_shapes[0][to]:
                    dims[to] = first_dims[i]
            return [(tuple(dims), ())]
        case "sharding_constraint":
            entries = recorder.axes_by_dim(params["sharding"].spec, len(first_dims))
            return [(recorder.reshard(operands[0], entries), ())]
        case "gather" if len(params["dimension_numbers"].collapsed_slice_dims) == 1:
            table, ids = operands  # [V, ...] and [..., 1]
            recorder.table_dims[ids] = table.dims
            return [((*ids.dims[:-1], *table.dims[1:]), table.dims[0].axes)]
        case "scatter-add" if operands[1] in recorder.table_dims:
            return [(recorder.table_dims[operands[1]], operands[1].axes)]
        case "pad" | "slice":
            return [(tuple(map(_resize, first_dims, in_shapes[0], out_shapes[0])), ())]
        case "squeeze" | "reduce":  # `reduce` combines elements with any function
            removed = params["dimensions"]
        case name if name.startswith("reduce_") and "axes" in params:
            removed = params["axes"]
    if removed:
        sum_axes = tuple(axis for i in removed for axis in first_dims[i].axes)
        dims = tuple(dim for i, dim in enumerate(first_dims) if i not in removed)
        return [(dims, sum_axes)] * len(out_shapes)
    pairs = [*zip(operands, in_shapes, strict=True)]
    return [(broadcast_dims(shape, pairs), ()) for shape in out_shapes]


def _resize(dim: Dim, old: int, new: int) -> Dim:
    """Return a padded or sliced dim, given its traced sizes before and after."""
    if old == new:
        return dim
    is_scaled = dim.is_known and not dim.axes
    return Dim(dim.size * new // old) if is_scaled else Dim(new, (), False)


def lay_out_product(
    params: Any, operands: list[LocalArray], recorder: CollectiveRecorder
) -> tuple[list[LocalArray], list[ResultLayout], Work | None]:
    """Lay out `dot_general`; return operands after gathers, the result, and the work.

    An axis that shards both operands in dims that do not match is gathered. If one
    operand is a parameter, it is the one that is gathered, unless the axis shards the
    contracted dim of the activation. Otherwise the smaller operand is gathered. A
    parameter is also gathered along an axis that shards a contracted dim of it alone.
    """
    a, b = operands
    (in_a, in_b), (batch_a, batch_b) = params["dimension_numbers"]
    matches = zip((*in_a, *batch_a), (*in_b, *batch_b), strict=True)
    matched = {x for i, j in matches for x in a.dims[i].axes if x in b.dims[j].axes}
    shared = ({*a.axes} & {*b.axes}) - matched
    if a.from_batch and b.from_batch:
        if a.bytes <= b.bytes:
            a = recorder.gather(a, shared)
        else:
            b = recorder.gather(b, shared)
    elif a.from_batch:
        summed = {axis for i in in_a for axis in a.dims[i].axes} & shared
        a = recorder.gather(a, summed)
        contracted_axes = {axis for i in in_b for axis in b.dims[i].axes}
        b = recorder.gather(b, (contracted_axes | {*a.axes}) - matched)
    elif b.from_batch:
        summed = {axis for i in in_b for axis in b.dims[i].axes} & shared
        b = recorder.gather(b, summed)
        contracted_axes = {axis for i in in_a for axis in a.dims[i].axes}
        a = recorder.gather(a, (contracted_axes | {*b.axes}) - matched)
    contracted = [_join(a.dims[i], b.dims[j]) for i, j in zip(in_a, in_b, strict=True)]
    batch = [_join(a.dims[i], b.dims[j]) for i, j in zip(batch_a, batch_b, strict=True)]
    rows = [d for i, d in enumerate(a.dims) if i not in (*in_a, *batch_a)]
    columns = [d for i, d in enumerate(b.dims) if i not in (*in_b, *batch_b)]
    groups = (rows, columns, contracted, batch)
    work = product_work(*(math.prod(d.size for d in group) for group in groups))
    sum_axes = tuple(axis for dim in contracted for axis in dim.axes)
    layouts = [((*batch, *rows, *columns), sum_axes)]
    # Without rows and columns, it is an elementwise product and a sum.
    return [a, b], layouts, work if rows or columns else None


def _join(a: Dim, b: Dim) -> Dim:
    """Return the known dim of a pair, or the smaller one; XLA slices the larger."""
    return min(a, b, key=lambda dim: (not dim.is_known, dim.size))


def lay_out_grouped_product(
    params: Any, operands: list[LocalArray]
) -> tuple[list[ResultLayout], Work]:
    """Lay out a product of rows grouped by expert; each device has its own rows.

    The work includes rows that no expert uses.
    """
    rows, operand, sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), _ = numbers.dot_dimension_numbers
    num_rows, depth = (dim.size for dim in rows.dims)
    if numbers.rhs_group_dimensions:  # products with matrices [E, K, N] or [E, N, K]
        dims = rows.dims[0], operand.dims[3 - contracted[0]]
        return [(dims, ())], product_work(num_rows, dims[1].size, depth)
    dims = sizes.dims[0], rows.dims[1], operand.dims[1]  # gradients of the matrices
    return [(dims, ())], product_work(depth, dims[2].size, num_rows)


def attention_work(equation: Any, operands: list[LocalArray]) -> Work:
    """Return the local work of a traced attention kernel.

    The local numbers of rows and heads may differ from the traced numbers; the largest
    operand gives the ratio. The first two floating-point operands are queries and keys.
    If the mask depends on the device, it is assumed to be causal.
    """
    pairs = zip((v.aval for v in equation.invars), operands, strict=True)
    floats = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]
    traced, local = max(floats, key=lambda pair: pair[0].size)
    (queries, _), (keys, _), *_ = floats
    products = list(_products(equation.params["jaxpr"]))
    rows, columns, _ = products[0].dims  # The first product computes a block.
    num_blocks = queries.shape[-2] * keys.shape[-2] / (rows * columns)
    heads = math.prod(queries.shape[:-2]) * local.size / traced.size
    flops = heads * num_blocks * sum(product.flops for product in products)
    masks = [array.value for array in operands if array.value is not None]
    if masks:  # the next blocks to load, and which blocks are computed
        return Work(flops, int(np.count_nonzero(masks[1])) / num_blocks)
    blocks_in_row = keys.shape[-2] / columns
    return Work(flops, (blocks_in_row + 1) / (2 * blocks_in_row))


def _products(jaxpr: Any) -> Iterator[Work]:
    """Yield the products of a kernel's body, including those in its loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[i] for i in inner)
            rows, columns = equation.outvars[0].aval.shape
            yield product_work(rows, columns, depth)
        for body in jaxprs_in_params(equation.params):
            yield from _products(body)
