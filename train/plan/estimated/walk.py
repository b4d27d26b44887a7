"""Walk over a traced program, and list what one device does, equation by equation.

The local part of each array follows from those of the arguments and from the
constraints in the program. If the shardings of operands do not match, data is sent by
the usual
rules: a parameter gives way to activations (it is gathered where it is used), and a sum
over a sharded dim stays a partial sum until something needs all of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from train.plan.cost import taken_part
from train.plan.estimated.arrays import (
    Dim,
    LocalArray,
    OperationPosition,
    PartialSum,
)
from train.plan.estimated.collectives import Sending
from train.plan.estimated.layouts import Layouts
from train.plan.estimated.operation import SHAPES, Operation, each
from train.plan.estimated.products import (
    grouped,
    lay_out_product,
    traced_attention_flops,
)

# Linear in all operands at once: partial sums may pass.
_LINEAR = SHAPES | {
    *("add", "add_any", "sub", "neg", "reduce_sum", "slice", "split", "pad"),
    *("concatenate", "stack", "unstack"),
}
# Operations whose result for a parameter is still this parameter.
_OWN = SHAPES | {"all_gather", "dynamic_slice", "ppermute", "unstack"}


class Walk:
    """Follows a program; `operations` and `sending` hold what came of it.

    Of branches `operations` has the last one's; the products and kernels of others that
    say how often they are taken are `in_branches`.
    """

    def __init__(self, sizes: Mapping[str, int], platform: str):
        """Start on a mesh."""
        self.operations: list[Operation] = []
        self.in_branches: list[Operation] = []  # only their products count
        self.sending = Sending(sizes, platform)
        self._times, self._scope = 1, ""
        self._layouts = Layouts(self.sending)

    @property
    def place(self) -> OperationPosition:
        """The position of the walk."""
        return OperationPosition(self._times, self._scope, id(self.operations))

    def each(self) -> Iterator[Operation]:
        """Return all operations, loops' too; `place` says how often they run."""
        return each(self.operations)

    def run(self, jaxpr: Any, arguments: Sequence[LocalArray]) -> list[LocalArray]:
        """Walk a jaxpr, open or closed, and return its results."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        arrays = dict(zip(jaxpr.invars, arguments, strict=True))
        arrays |= {var: _constant(var.aval) for var in jaxpr.constvars}

        def read(atom: Any) -> LocalArray:
            return _constant(atom.aval) if isinstance(atom, Literal) else arrays[atom]

        for equation in jaxpr.eqns:
            if not equation.outvars:  # saving a kernel's results leaves such equations
                continue
            before, own = self._scope, str(equation.source_info.name_stack)
            self._scope = f"{before}/{own}" if own else before
            results = self._equation(equation, [read(v) for v in equation.invars])
            arrays.update(zip(equation.outvars, results, strict=True))
            self._scope = before
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name, params = equation.primitive.name, equation.params
        if name == "name":  # names a result for a rematerialisation policy
            return operands
        if name == "scan":
            return self._scan(equation, operands)
        if name == "shard_map":
            return self._shard_map(params, operands)
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if name == "cond":
            return self._branches(params["branches"], operands[1:])
        if name == "while":  # the length is unknown: it counts once
            inner = params["body_jaxpr"]
            operands = operands[params["cond_nconsts"] :]
        if inner is None or name == "pallas_call":
            return self._plain(equation, operands)
        return self.run(inner, operands)

    def _branches(
        self, branches: Sequence[Any], operands: list[LocalArray]
    ) -> list[LocalArray]:
        """Walk the last branch, as often as a scope in it says, or else always.

        Of the others that say how often they are taken counts what they multiply, and
        what they alone keep: in its place the last one has zeros.
        """
        times, held, results = self._times, self.operations, list[LocalArray]()
        for branch in branches:
            scopes = (str(e.source_info.name_stack) for e in branch.jaxpr.eqns)
            part, last = taken_part(scopes), branch is branches[-1]
            if part is None and not last:
                continue
            self._times = times if part is None else round(times * part)
            self.operations = held if last else []
            found = self.run(branch, operands)
            results = [
                own if own.from_batch or not before.from_batch else before
                for before, own in zip(results or found, found, strict=True)
            ]
            if not last:
                self.in_branches += [op for op in self.each() if op.flops]
        self._times, self.operations = times, held
        return results

    def _scan(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk a loop once; what has a dim more outside is sliced, or stacked."""
        inner, trips = equation.params["jaxpr"].jaxpr, equation.params["length"]

        def same_rank(outside: Any, inside: Any) -> int:
            pairs = zip(outside, inside, strict=True)
            return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

        whole = same_rank(equation.invars, inner.invars)
        carry = same_rank(equation.outvars, inner.outvars)
        slices = [
            replace(a, dims=a.dims[1:], sums=(), made_from=None)
            for a in operands[whole:]
        ]
        outer, times = self.operations, self._times
        loop = Operation("scan", operands, [], self.place, trips=trips, slices=slices)
        self.operations, self._times = loop.body, times * trips
        results = self.run(inner, [*operands[:whole], *slices])
        self.operations, self._times = outer, times
        loop.carried, loop.stacked = results[:carry], results[carry:]
        loop.results = list(loop.carried)
        for a in loop.stacked:
            source = a.source if a.source is not a else None
            stack = replace(a, dims=(Dim(trips), *a.dims), made_from=source)
            loop.results.append(stack)
        self.operations.append(loop)
        return loop.results

    def _shard_map(self, params: Any, operands: list[LocalArray]) -> list[LocalArray]:
        """Walk the per-device program: dims over manual axes are local there."""
        by_hand, sending = params["newly_manual_axes"], self.sending
        arguments, results = list[LocalArray](), list[LocalArray]()
        for array, spec in zip(operands, params["in_specs"], strict=True):
            entries = sending.entries(spec, len(array.dims))
            for i, dim in enumerate(array.dims):
                entries[i] += tuple(a for a in dim.axes if a not in by_hand)
            dims = sending.lay_out(array, entries, self.place, strict=True)
            own = [tuple(a for a in dim.axes if a not in by_hand) for dim in dims]
            sizes = (dim.size for dim in dims)
            arguments.append(self._renamed(array, map(Dim, sizes, own)))
        inside = self.run(params["jaxpr"], arguments)
        for array, spec in zip(inside, params["out_specs"], strict=True):
            entries = sending.entries(spec, len(array.dims))
            dims = [
                Dim(dim.size, axes + dim.axes)
                for dim, axes in zip(array.dims, entries, strict=True)
            ]
            results.append(self._renamed(array, dims))
        return results

    def _renamed(self, array: LocalArray, dims: Any) -> LocalArray:
        """Return an array with other axes; it stays where it is."""
        result = replace(array, dims=tuple(dims), made_from=array.source)
        self.operations.append(Operation("shard_map", [array], [result], self.place))
        return result

    def _plain(self, equation: Any, operands: list[LocalArray]) -> list[LocalArray]:
        name, params, place = equation.primitive.name, equation.params, self.place
        scalars = all(array.size == 1 for array in operands[1:])
        by_scalar = name in ("mul", "div") and (scalars or operands[0].size == 1)
        linear = name in _LINEAR or by_scalar
        for array in () if linear else operands:
            self.sending.reduce(array, ())
        flops, part, square = 0.0, 1.0, True
        if name == "pallas_call":
            flops, part, square = traced_attention_flops(
                equation, operands, self._scope
            )
        if name == "dot_general":
            pairs = params["dimension_numbers"]
            left, right = operands
            *operands, layout, flops = lay_out_product(
                left, right, pairs, self.sending, place
            )
            layouts = [layout]
        elif name == "ragged_dot_general":
            layout, flops = grouped(params, operands, self._scope)
            layouts = [layout]
        else:
            layouts = self._layouts.of(equation, operands, place)
        from_batch = any(array.from_batch for array in operands)
        kept = [p for a in operands for p in a.sums if linear and not p.reduced]
        results = []
        for var, (dims, summed) in zip(equation.outvars, layouts, strict=True):
            on_host = var.aval.memory_space is jax.memory.Space.Host
            size = var.aval.dtype.itemsize
            array = LocalArray(dims, size, from_batch, on_host=on_host)
            if name in _OWN:
                array.source, array.label = operands[0].source, operands[0].label
            axes = self.sending.wide(summed) if from_batch else ()
            array.sums = tuple(kept)
            if axes:
                is_product = name == "dot_general"
                array.sums += (PartialSum(axes, array.bytes, place, is_product),)
            results.append(array)
        operation = Operation(
            name,
            operands,
            results=results,
            place=place,
            flops=flops,
            part=part,
            square=square,
        )
        self.operations.append(operation)
        return results


def _constant(aval: Any) -> LocalArray:
    dims = tuple(Dim(size, (), False) for size in aval.shape)
    return LocalArray(dims, aval.dtype.itemsize)
