"""Walk over a traced program, and list the operations and collectives of one device.

The local part of each array follows from the shardings of the arguments and from the
constraints in the program. If the shardings of operands do not match, a parameter is
gathered where it is used. A sum over a sharded dim stays a partial sum on each device
until an operation needs the complete sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from model.config import ModelConfig
from train.plan.branches import branch_counts
from train.plan.estimated.arrays import (
    Axes,
    Dim,
    LocalArray,
    Operation,
    PartialSum,
    StepPosition,
)
from train.plan.estimated.collectives import CollectiveRecorder
from train.plan.estimated.layouts import (
    attention_work,
    lay_out_grouped_product,
    lay_out_product,
    lay_out_results,
)
from train.plan.sections import outermost_part

# Operations that only change the dtype, shape or sharding.
_SHAPES = {
    *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
    *("expand_dims", "copy", "reduce_precision", "sharding_constraint"),
}
# Operations that are linear in all operands together; products only by a scalar.
# They commute with a reduction.
_LINEAR = _SHAPES | {
    *("add", "add_any", "sub", "neg", "reduce_sum", "slice", "split", "pad"),
    *("concatenate", "stack", "unstack", "mul", "div"),
}
# Operations whose result counts as a copy of the operand, or of a part of it.
_COPIES = _SHAPES | {"all_gather", "bitcast_convert_type", "layout_constraint"}


class Walk:
    """Follows a program, and records its operations and collectives."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        platform: str,
        count: float = 1,
        model: ModelConfig | None = None,
    ):
        """Start a program that runs `count` times; its model decides about branches."""
        self.operations: list[Operation] = []
        self.recorder = CollectiveRecorder(sizes, platform)
        self._model = model
        self._microbatches = count
        self._count = count
        self._scope = ""

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
            outer = self._scope
            inner = str(equation.source_info.name_stack)
            self._scope = f"{outer}/{inner}" if inner else outer
            results = self._walk(equation, [read(v) for v in equation.invars])
            arrays.update(zip(equation.outvars, results, strict=True))
            self._scope = outer
        return [read(atom) for atom in jaxpr.outvars]

    def _walk(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name = equation.primitive.name
        params = equation.params
        runs_once = "copies" in self._scope  # once in each step (train/core/rows.py)
        count = self._count // self._microbatches if runs_once else self._count
        self.recorder.position = StepPosition(count, self._scope)
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
        # The bodies of the last two compute blocks and elements, not whole operands.
        if inner is None or name in ("pallas_call", "reduce"):
            return self._record(equation, operands)
        return self.run(inner, operands)

    def _cond(
        self, branches: Sequence[Any], operands: list[LocalArray]
    ) -> list[LocalArray]:
        """Walk the branches that are taken (plan/branches.py).

        A result that is constant in all branches but one is the result of that branch.
        """
        count = self._count
        outputs = list[list[LocalArray]]()
        counts = branch_counts(self._model, outermost_part(self._scope), count)
        for branch, self._count in zip(branches, counts, strict=True):
            if self._count:
                outputs.insert(0, self.run(branch, operands))
        self._count = count
        return [
            max(arrays, key=lambda array: array.from_batch or array.value is not None)
            for arrays in zip(*outputs, strict=True)
        ]

    def _scan(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk the body of a loop once.

        Operands with one more dim outside than inside the body are sliced, and such
        results are stacked.
        """
        body = equation.params["jaxpr"]
        trips = equation.params["length"]

        def count_same_rank(outer_vars: Any, inner_vars: Any) -> int:
            pairs = zip(outer_vars, inner_vars, strict=True)
            return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

        num_unsliced = count_same_rank(equation.invars, body.jaxpr.invars)
        num_carried = count_same_rank(equation.outvars, body.jaxpr.outvars)
        sliced = operands[num_unsliced:]
        slices = [replace(array, dims=array.dims[1:], sums=()) for array in sliced]
        loop = Operation("scan", operands, [], self.recorder.position, trips=trips)
        outer_operations = self.operations
        outer_count = self._count
        self.operations = loop.body
        self._count = outer_count * trips
        results = self.run(body, [*operands[:num_unsliced], *slices])
        self.operations = outer_operations
        self._count = outer_count
        loop.stacked = results[num_carried:]
        stacks = [replace(a, dims=(Dim(trips), *a.dims)) for a in loop.stacked]
        loop.results = [*results[:num_carried], *stacks]
        self.operations.append(loop)
        return loop.results

    def _shard_map(self, params: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk a per-device program, in which manual axes do not shard dims."""
        recorder = self.recorder
        arguments = list[LocalArray]()
        results = []

        def automatic_axes(dim: Dim) -> Axes:
            return tuple(a for a in dim.axes if a not in params["newly_manual_axes"])

        for array, spec in zip(operands, params["in_specs"], strict=True):
            manual = recorder.axes_by_dim(spec, len(array.dims))
            pairs = zip(manual, array.dims, strict=True)
            axes_by_dim = [axes + automatic_axes(dim) for axes, dim in pairs]
            dims = recorder.reshard(array, axes_by_dim)
            local_dims = (Dim(dim.size, automatic_axes(dim)) for dim in dims)
            arguments.append(array.with_dims(local_dims))
        inner_results = self.run(params["jaxpr"], arguments)
        for array, spec in zip(inner_results, params["out_specs"], strict=True):
            manual = recorder.axes_by_dim(spec, len(array.dims))
            pairs = zip(manual, array.dims, strict=True)
            dims = (Dim(dim.size, axes + dim.axes) for axes, dim in pairs)
            results.append(array.with_dims(dims))
        return results

    def _record(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name = equation.primitive.name
        params = equation.params
        recorder = self.recorder
        position = recorder.position
        work = None
        is_product = name in ("mul", "div") and all(a.size > 1 for a in operands)
        is_linear = name in _LINEAR and not is_product
        for array in () if is_linear else operands:
            recorder.reduce(array, _elementwise_axes(equation, operands))
        if name == "dot_general":
            operands, layouts, work = lay_out_product(params, operands, recorder)
        elif name == "ragged_dot_general":
            layouts, work = lay_out_grouped_product(params, operands)
        else:
            layouts = lay_out_results(equation, operands, recorder)
        if name == "pallas_call":
            work = attention_work(equation, operands)
        from_batch = any(array.from_batch for array in operands)
        is_copy = name in (_SHAPES if from_batch else _COPIES)
        sums = [p for a in operands for p in a.sums if is_linear and not p.is_reduced]
        value = operands[0].value if is_copy else None
        results = []
        for var, (dims, sum_axes) in zip(equation.outvars, layouts, strict=True):
            itemsize = var.aval.dtype.itemsize
            on_host = var.aval.memory_space is jax.memory.Space.Host
            array = LocalArray(
                dims,
                itemsize,
                from_batch,
                sums=tuple(sums),
                on_host=on_host,
                value=value,
            )
            # A rounded activation is another array, but a rounded parameter is a copy.
            if is_copy and (array.bytes == operands[0].bytes or not from_batch):
                array.origin = operands[0].origin
            if sum_axes and from_batch:
                is_dot = name == "dot_general"
                from_both = all(operand.from_batch for operand in operands)
                partial_sum = PartialSum(
                    sum_axes,
                    array.bytes,
                    position,
                    is_product=is_dot,
                    is_activation=is_dot and not from_both,
                )
                array.sums += (partial_sum,)
            results.append(array)
        self.operations.append(Operation(name, operands, results, position, work))
        return results


def _elementwise_axes(equation: Any, operands: Sequence[LocalArray]) -> Axes:
    """Return the axes that shard operands of the result's shape, all taken together.

    A partial sum that is combined with such an operand is scattered like it. The
    result is () for products and for operations that change the shape.
    """
    shape = equation.outvars[0].aval.shape
    shapes = [variable.aval.shape for variable in equation.invars]
    if equation.primitive.name == "dot_general" or shape not in shapes:
        return ()
    pairs = zip(operands, shapes, strict=True)
    alike = [array for array, traced in pairs if traced == shape and array.from_batch]
    return tuple(axis for array in alike for axis in array.axes)


def _constant(aval: Any, value: Any = None) -> LocalArray:
    dims = tuple(Dim(size, (), False) for size in aval.shape)
    masks = value if aval.dtype == np.int8 and aval.shape else None
    return LocalArray(dims, aval.dtype.itemsize, value=masks)
