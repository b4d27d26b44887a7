"""Walk over a traced program, and list the operations and collectives of one device.

The local part of each array follows from the shardings of the arguments and from the
constraints in the program. If the shardings of operands do not match, a parameter is
gathered where it is used. A sum over a sharded dim stays a partial sum on each device
until an operation needs the complete sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from model.config import ModelConfig
from train.plan.branches import branch_counts
from train.plan.estimated.arrays import (
    Dim,
    LocalArray,
    OperationPosition,
    PartialSum,
)
from train.plan.estimated.collectives import CollectiveRecorder
from train.plan.estimated.layouts import Layouts
from train.plan.estimated.operation import SHAPES, Operation, flatten_loops
from train.plan.estimated.products import (
    attention_flops,
    lay_out_grouped_product,
    lay_out_product,
)
from train.plan.sections import outermost_part

# Operations that are linear in all operands together. They commute with a reduction.
_LINEAR = SHAPES | {
    *("add", "add_any", "sub", "neg", "reduce_sum", "slice", "split", "pad"),
    *("concatenate", "stack", "unstack"),
}
# Operations whose result counts as the operand's parameter, or as a part of it.
_SAME_PARAMETER = SHAPES | {
    *("all_gather", "bitcast_convert_type", "dynamic_slice", "layout_constraint"),
    *("ppermute", "unstack"),
}


class Walk:
    """Follows a program, and records its operations and collectives."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        platform: str,
        model: ModelConfig | None,
        count: int,
    ):
        """Start without operations.

        Args:
            sizes: the sizes of the mesh axes.
            platform: the platform of the devices.
            model: the config of the model in the program, if it contains one. It says
                how often branches are taken.
            count: how often the program runs, the number of microbatches of a step.
        """
        self.operations: list[Operation] = []
        self.recorder = CollectiveRecorder(sizes, platform, count)
        self._model, self._count, self._scope = model, count, ""
        self._layouts = Layouts(self.recorder)

    @property
    def position(self) -> OperationPosition:
        """The current position of the walk."""
        return OperationPosition(self._count, self._scope, id(self.operations))

    def flatten(self) -> Iterator[Operation]:
        """Yield all operations, including those in loops."""
        return flatten_loops(self.operations)

    def run(self, jaxpr: Any, arguments: Sequence[LocalArray]) -> list[LocalArray]:
        """Walk a jaxpr, open or closed, and return its results."""
        constants = getattr(jaxpr, "consts", [None] * len(jaxpr.constvars))
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        arrays = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            arrays[variable] = _constant(variable.aval, value)

        def read(atom: Any) -> LocalArray:
            if isinstance(atom, Literal):
                return _constant(atom.aval, atom.val)
            return arrays[atom]

        for equation in jaxpr.eqns:
            if not equation.outvars:  # a remnant of saving a kernel's results
                continue
            outer, inner = self._scope, str(equation.source_info.name_stack)
            self._scope = f"{outer}/{inner}" if inner else outer
            results = self._walk(equation, [read(v) for v in equation.invars])
            arrays.update(zip(equation.outvars, results, strict=True))
            self._scope = outer
        return [read(atom) for atom in jaxpr.outvars]

    def _walk(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name, params = equation.primitive.name, equation.params
        # The first names a result for a rematerialisation policy.
        if name in ("name", "optimization_barrier"):
            return operands
        if name == "scan":
            return self._scan(equation, operands)
        if name == "shard_map":
            return self._shard_map(params, operands)
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if name == "cond":
            return self._cond(params["branches"], operands[1:])
        if name == "while":  # The number of trips is unknown, so count one.
            inner = params["body_jaxpr"]
            operands = operands[params["cond_nconsts"] :]
        if inner is None or name == "pallas_call":
            return self._record(equation, operands)
        return self.run(inner, operands)

    def _cond(
        self, branches: Sequence[Any], operands: list[LocalArray]
    ) -> list[LocalArray]:
        """Walk the branches that are taken (plan/branches.py).

        A result that is constant in all branches but one is the result of that branch.
        """
        count, results = self._count, list[LocalArray]()
        counts = branch_counts(self._model, outermost_part(self._scope), count)
        for branch, self._count in zip(branches, counts, strict=True):
            if self._count:
                outputs = self.run(branch, operands)
                results = [
                    new if _is_variable(new) or not _is_variable(old) else old
                    for old, new in zip(results or outputs, outputs, strict=True)
                ]
        self._count = count
        return results

    def _scan(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk the body of a loop once.

        Operands with one more dim outside than inside the body are sliced, and such
        results are stacked.
        """
        body, trips = equation.params["jaxpr"], equation.params["length"]

        def count_same_rank(outer_vars: Any, inner_vars: Any) -> int:
            pairs = zip(outer_vars, inner_vars, strict=True)
            return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

        num_unsliced = count_same_rank(equation.invars, body.jaxpr.invars)
        num_carried = count_same_rank(equation.outvars, body.jaxpr.outvars)
        slices = [
            replace(a, dims=a.dims[1:], sums=(), made_from=None)
            for a in operands[num_unsliced:]
        ]
        outer_operations, outer_count = self.operations, self._count
        position = self.position
        loop = Operation("scan", operands, [], position, trips=trips, slices=slices)
        self.operations, self._count = loop.body, outer_count * trips
        results = self.run(body, [*operands[:num_unsliced], *slices])
        self.operations, self._count = outer_operations, outer_count
        loop.carried, loop.stacked = results[:num_carried], results[num_carried:]
        loop.results = list(loop.carried)
        for a in loop.stacked:
            source = a.source if a.source is not a else None
            stack = replace(a, dims=(Dim(trips), *a.dims), made_from=source)
            loop.results.append(stack)
        self.operations.append(loop)
        return loop.results

    def _shard_map(self, params: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk a per-device program, in which manual axes do not shard dims."""
        manual_axes, recorder = params["newly_manual_axes"], self.recorder
        arguments, results = list[LocalArray](), list[LocalArray]()
        for array, spec in zip(operands, params["in_specs"], strict=True):
            entries = recorder.axes_by_dim(spec, len(array.dims))
            for i, dim in enumerate(array.dims):
                entries[i] += tuple(a for a in dim.axes if a not in manual_axes)
            dims = recorder.reshard(array, entries, self.position, strict=True)
            automatic = [tuple(a for a in d.axes if a not in manual_axes) for d in dims]
            sizes = (dim.size for dim in dims)
            arguments.append(self._with_dims(array, map(Dim, sizes, automatic)))
        inner_results = self.run(params["jaxpr"], arguments)
        for array, spec in zip(inner_results, params["out_specs"], strict=True):
            entries = recorder.axes_by_dim(spec, len(array.dims))
            dims = [
                Dim(dim.size, axes + dim.axes)
                for dim, axes in zip(array.dims, entries, strict=True)
            ]
            results.append(self._with_dims(array, dims))
        return results

    def _with_dims(self, array: LocalArray, dims: Any) -> LocalArray:
        """Return the same local array with other axes in its dims."""
        result = replace(array, dims=tuple(dims), made_from=array.source)
        self.operations.append(Operation("shard_map", [array], [result], self.position))
        return result

    def _record(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name, params, position = equation.primitive.name, equation.params, self.position
        are_scalars = all(array.size == 1 for array in operands[1:])
        is_by_scalar = name in ("mul", "div") and (are_scalars or operands[0].size == 1)
        is_linear = name in _LINEAR or is_by_scalar
        for array in () if is_linear else operands:
            self.recorder.reduce(array, ())
        size, flops, computed = None, 0.0, 1.0
        if name in ("dot_general", "ragged_dot_general"):
            if name == "dot_general":
                left, right = operands
                pairs = params["dimension_numbers"]
                product = lay_out_product(left, right, pairs, self.recorder, position)
            else:
                product = lay_out_grouped_product(params, operands)
            operands, size, layouts = product.operands, product.size, [product.layout]
            flops = size.flops if size else 0.0
        else:
            layouts = self._layouts.lay_out_results(equation, operands, position)
        if name == "pallas_call":
            flops, computed = attention_flops(equation, operands)
        from_batch = any(array.from_batch for array in operands)
        sums = [p for a in operands for p in a.sums if is_linear and not p.is_reduced]
        results = []
        for var, (dims, sum_axes) in zip(equation.outvars, layouts, strict=True):
            on_host = var.aval.memory_space is jax.memory.Space.Host
            width = var.aval.dtype.itemsize
            array = LocalArray(dims, width, from_batch, on_host=on_host)
            if name in _SAME_PARAMETER:
                array.source, array.label = operands[0].source, operands[0].label
                array.value = operands[0].value
            axes = self.recorder.nontrivial_axes(sum_axes) if from_batch else ()
            array.sums = tuple(sums)
            if axes:
                is_product = name == "dot_general"
                array.sums += (PartialSum(axes, array.bytes, position, is_product),)
            results.append(array)
        operation = Operation(
            name,
            operands,
            results=results,
            position=position,
            flops=flops,
            computed=computed,
            product=size,
        )
        self.operations.append(operation)
        return results


def _constant(aval: Any, value: Any = None) -> LocalArray:
    dims = tuple(Dim(size, (), False) for size in aval.shape)
    masks = value if aval.dtype == np.int8 and aval.shape else None
    return LocalArray(dims, aval.dtype.itemsize, value=masks)


def _is_variable(array: LocalArray) -> bool:
    return array.from_batch or array.value is not None
