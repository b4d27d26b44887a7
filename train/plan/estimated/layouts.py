"""Lay out the results of equations: find their local dims."""

from typing import Any

from train.plan.estimated.arrays import (
    Axes,
    Dim,
    LocalArray,
    Position,
    broadcast_dims,
    reshape_dims,
)
from train.plan.estimated.collectives import COLLECTIVES, CollectiveRecorder

ResultLayout = tuple[tuple[Dim, ...], Axes]  # dims, and the axes of a partial sum


class Layouts:
    """Lays out the results of a walk's equations, one after the other."""

    def __init__(self, recorder: CollectiveRecorder):
        """Start a walk; collectives are added to `recorder`."""
        self._recorder = recorder
        self._table_dims: dict[LocalArray, tuple[Dim, ...]] = {}

    def lay_out_results(
        self, equation: Any, operands: list[LocalArray], position: Position
    ) -> list[ResultLayout]:
        """Return each result's dims, and the axes along which it is a partial sum."""
        params, recorder = equation.params, self._recorder
        in_shapes = [v.aval.shape for v in equation.invars]
        out_shapes = [v.aval.shape for v in equation.outvars]
        first_dims = operands[0].dims if operands else tuple[Dim, ...]()
        removed = ()
        match equation.primitive.name:
            case name if name in COLLECTIVES:
                dims_of_results = recorder.exchange(name, params, operands, position)
                return [(dims, ()) for dims in dims_of_results]
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
                return [(recorder.reshard(operands[0], entries, position), ())]
            case "gather" if len(params["dimension_numbers"].collapsed_slice_dims) == 1:
                table, ids = operands  # [V, ...] and [..., 1]
                self._table_dims[ids] = table.dims
                return [((*ids.dims[:-1], *table.dims[1:]), table.dims[0].axes)]
            case "scatter-add" if operands[1] in self._table_dims:
                return [(self._table_dims[operands[1]], operands[1].axes)]
            case "pad" | "slice":
                dims = map(_resize, first_dims, in_shapes[0], out_shapes[0])
                return [(tuple(dims), ())]
            case "squeeze":
                removed = params["dimensions"]
            case "unstack":
                removed = [params["axis"]]
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
