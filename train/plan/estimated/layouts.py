"""Lay out the results of equations: find their local dims and record collectives."""

from collections.abc import Sequence
from typing import Any

from model.axes import mesh_axes
from train.mesh_sizes import num_shards
from train.plan.estimated.arrays import (
    Axes,
    Dim,
    LocalArray,
    OperationPosition,
    broadcast_dims,
    reshape_dims,
    resize_dim,
)
from train.plan.estimated.collectives import CollectiveRecorder

_LANES = 128  # the lanes of a TPU's vectors
ResultLayout = tuple[tuple[Dim, ...], Axes]  # dims, and the axes of a partial sum


class Layouts:
    """Lays out the results of a walk's equations, one after the other."""

    def __init__(self, recorder: CollectiveRecorder):
        """Start a walk; collectives are added to `recorder`."""
        self._recorder = recorder
        self._table_dims: dict[LocalArray, tuple[Dim, ...]] = {}

    def lay_out_results(
        self, equation: Any, operands: list[LocalArray], position: OperationPosition
    ) -> list[ResultLayout]:
        """Return each result's dims, and the axes along which it is a partial sum."""
        params = equation.params
        in_shapes = [v.aval.shape for v in equation.invars]
        out_shapes = [v.aval.shape for v in equation.outvars]
        first_dims = operands[0].dims if operands else tuple[Dim, ...]()
        removed: Sequence[int] = ()
        match equation.primitive.name:
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
                spec = params["sharding"].spec
                return [(self._recorder.reshard(operands[0], spec, position), ())]
            case "gather" if len(params["dimension_numbers"].collapsed_slice_dims) == 1:
                return [self._lay_out_lookup(table=operands[0], ids=operands[1])]
            case "scatter-add" if operands[1] in self._table_dims:
                return [(self._table_dims[operands[1]], operands[1].axes)]
            case "psum" | "psum_invariant" | "pmax":
                for array in operands:
                    axes = params["axes"]
                    kind, label = "all-reduce", array.label
                    self._recorder.add(axes, kind, array.bytes, position, label)
            case "ppermute":
                (array,) = operands
                axes, kind = params["axis_name"], "collective-permute"
                self._recorder.add(axes, kind, array.bytes, position, array.label)
            case "ragged_all_to_all":
                array, output, *_ = operands
                axes, kind = params["axis_name"], "ragged-all-to-all"
                size = min(array.bytes, output.bytes)
                if len(in_shapes[0]) == 1 and self._recorder.platform == "tpu":
                    size *= _LANES  # XLA sends whole vectors
                self._recorder.add(axes, kind, size, position, array.label)
                return [(output.dims, ())]
            case "all_gather" | "reduce_scatter" | "all_to_all" as name:
                return [(self._exchange(name, params, operands[0], position), ())]
            case "pad" | "slice":
                dims = map(resize_dim, first_dims, in_shapes[0], out_shapes[0])
                return [(tuple(dims), ())]
            case "squeeze":
                removed = params["dimensions"]
            case "unstack":
                removed = [params["axis"]]
            case "stack":
                dims = [*first_dims]
                dims.insert(params["axis"], Dim(len(operands)))
                return [(tuple(dims), ())]
            case name if name.startswith("reduce_") and "axes" in params:
                removed = params["axes"]
        if removed:
            sum_axes = tuple(axis for i in removed for axis in first_dims[i].axes)
            dims = tuple(dim for i, dim in enumerate(first_dims) if i not in removed)
            return [(dims, sum_axes)] * len(out_shapes)
        layouts = list[ResultLayout]()
        for shape in out_shapes:
            dims = broadcast_dims(shape, zip(operands, in_shapes, strict=True))
            self._match_parameters(dims, operands, position)
            layouts.append((dims, ()))
        return layouts

    def _match_parameters(
        self,
        dims: tuple[Dim, ...],
        operands: list[LocalArray],
        position: OperationPosition,
    ) -> None:
        """Record gathers and exchanges of parameters sharded unlike the result."""
        uses_batch = any(array.from_batch for array in operands)
        for array in operands:
            if array.size == 1 or len(array.dims) != len(dims) or array.from_batch:
                continue
            pairs = zip(array.dims, dims, strict=True)
            lost = tuple(a for old, new in pairs for a in old.axes if a not in new.axes)
            used = {axis for dim in dims for axis in dim.axes}
            moved = tuple(axis for axis in lost if axis in used)
            if uses_batch or not moved:
                self._recorder.gather(array, lost, position)
            else:
                kind = "all-to-all"
                self._recorder.add(moved, kind, array.bytes, position, array.label)

    def _lay_out_lookup(self, table: LocalArray, ids: LocalArray) -> ResultLayout:
        """Lay out the rows of a table [V, ...] selected by ids [..., 1]."""
        self._table_dims[ids] = table.dims
        return (*ids.dims[:-1], *table.dims[1:]), table.dims[0].axes

    def _exchange(
        self, name: str, params: Any, array: LocalArray, position: OperationPosition
    ) -> tuple[Dim, ...]:
        """Record a collective of a per-device program; return the dims after it."""
        axes = mesh_axes(params["axis_name"])
        groups, dims = params["axis_index_groups"], list(array.dims)
        members = tuple(groups[0]) if groups else ()
        n = len(members) or num_shards(self._recorder.sizes, axes)  # devices in a group
        grown_dim = params.get("all_gather_dimension", params.get("concat_axis"))
        split_dim = params.get("scatter_dimension", params.get("split_axis"))
        if grown_dim is not None:
            dims[grown_dim] = dims[grown_dim]._replace(size=dims[grown_dim].size * n)
        if split_dim is not None:
            dims[split_dim] = dims[split_dim]._replace(size=dims[split_dim].size // n)
        payload = array.bytes * (n if name == "all_gather" else 1)
        kind = name.replace("_", "-")
        self._recorder.add(axes, kind, payload, position, array.label, members)
        return tuple(dims)
