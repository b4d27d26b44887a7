"""Products: where their results lie, and their FLOPs on a device."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from train.plan.cost import causal_blocks, computed_blocks, expected_part
from train.plan.estimated.arrays import Axes, Dim, LocalArray, OperationPosition, uncut
from train.plan.estimated.collectives import Sending


def lay_out_product(
    a: LocalArray, b: LocalArray, pairs: Any, sending: Sending, place: OperationPosition
) -> tuple[LocalArray, LocalArray, tuple[tuple[Dim, ...], Axes], float]:
    """Lay out `dot_general` on a device.

    Some axes shard both operands, but in dims that do not match, or shard a contracted
    dim of one operand only. They are gathered: those of the parameter, and for updates
    of two parameters those of the contracted dim, or else of the smaller operand.

    Returns:
        The operands of the local product, the result's dims with the axes along which
        it is a partial sum, and the FLOPs.
    """
    (in_a, in_b), (batch_a, batch_b) = pairs
    met = dict(zip((*in_a, *batch_a), (*in_b, *batch_b), strict=True))
    for axis in dict.fromkeys((*a.axes, *b.axes)):
        at_a, at_b = _dim_of(a, axis), _dim_of(b, axis)
        both = at_a is not None and at_b is not None
        if both and met.get(at_a) == at_b:
            continue
        gathered = None
        if a.from_batch != b.from_batch:
            weight, at, inner = (b, at_b, in_b) if a.from_batch else (a, at_a, in_a)
            gathered = weight if at is not None and (both or at in inner) else None
        elif both and not a.from_batch:
            gathered = min(b, a, key=lambda array: array.bytes)
            if (at_a in in_a) != (at_b in in_b):
                gathered = a if at_a in in_a else b
        if gathered is not None:
            sending.gather(gathered, (axis,), place)
            whole = uncut(gathered, (axis,), sending.sizes)
            a, b = (whole, b) if gathered is a else (a, whole)
    contracted = [_met(a.dims[i], b.dims[j]) for i, j in zip(in_a, in_b, strict=True)]
    batch = [_met(a.dims[i], b.dims[j]) for i, j in zip(batch_a, batch_b, strict=True)]
    free_a = [d for i, d in enumerate(a.dims) if i not in (*in_a, *batch_a)]
    free_b = [d for i, d in enumerate(b.dims) if i not in (*in_b, *batch_b)]
    flops = 2.0 * math.prod(d.size for d in (*contracted, *batch, *free_a, *free_b))
    if not free_a and not free_b:
        flops = 0.0  # a sum of elements' products, which is no product of matrices
    summed = tuple(axis for dim in contracted for axis in dim.axes)
    return a, b, ((*batch, *free_a, *free_b), summed), flops


def _dim_of(array: LocalArray, axis: str) -> int | None:
    return next((i for i, dim in enumerate(array.dims) if axis in dim.axes), None)


def _met(a: Dim, b: Dim) -> Dim:
    """Return the dim of two that meet: if one is cut, the other is sliced."""
    if not (a.known and b.known):
        return a if a.known else b
    return min(a, b, key=lambda dim: dim.size)


def grouped(
    params: Any, operands: list[LocalArray], scope: str
) -> tuple[tuple[tuple[Dim, ...], Axes], float]:
    """Lay out a product of rows grouped by expert, each row once.

    Returns:
        The result's dims and the axes along which it is a partial sum, none, for
        devices have their own rows; and FLOPs of the rows in use.
    """
    rows, other, sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), _ = numbers.dot_dimension_numbers
    if numbers.rhs_group_dimensions:  # products with matrices [E, K, N] or [E, N, K]
        dims = rows.dims[0], other.dims[3 - contracted[0]]
    else:  # to matrices
        dims = sizes.dims[0], rows.dims[1], other.dims[1]
    flops = 2.0 * rows.size * dims[-1].size
    return (dims, ()), flops * expected_part(scope)


class KernelFlops(NamedTuple):
    """The FLOPs of an attention kernel on a device.

    part: of these, the part that a causal mask of blocks leaves.
    square: whether there are as many keys as queries.
    """

    flops: float
    part: float
    square: bool


def traced_attention_flops(
    equation: Any, operands: list[LocalArray], scope: str
) -> KernelFlops:
    """Count a kernel's FLOPs.

    Every cell of its grid multiplies as its body says; what a device has of rows and
    heads may differ from what was traced, in the largest operand as in others. The
    first two operands of floats are queries and keys.
    """
    params = equation.params
    cells = math.prod(params["grid_mapping"].grid)
    pairs = zip((v.aval for v in equation.invars), operands, strict=True)
    floats = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]
    traced, local = max(floats, key=lambda pair: pair[0].size)
    flops = cells * _flops_inside(params["jaxpr"]) * local.size / traced.size
    lengths = [of.dims[-2].size for _, of in floats[:2] if len(of.dims) > 1]
    square = len({*lengths}) == 1
    masks = [v.aval.shape[-2:] for v in equation.invars if v.aval.dtype == np.int8]
    if not masks:
        return KernelFlops(flops, 1.0, square)
    computed, blocks = computed_blocks(scope) or causal_blocks(masks[0])
    # The grid is as long as the mask.
    flops *= blocks / math.prod(masks[0])
    return KernelFlops(flops, computed / blocks, square)


def _flops_inside(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[i] for i in inner)
            total += 2.0 * equation.outvars[0].aval.size * depth
        trips = equation.params.get("length", 1)
        total += trips * sum(map(_flops_inside, jaxprs_in_params(equation.params)))
    return total
