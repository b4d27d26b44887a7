"""What one device does of a traced program, equation by equation.

Each array's part follows from those of the arguments and from the constraints in the
program. Where operands do not fit together something is sent, by textbooks' rules: a
parameter gives way to what the batch makes (it is gathered where it is used), and a sum
over a dim that is cut stays a partial one until something needs all of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from train.plan.estimated.arrays import (
    Array,
    Axes,
    Dim,
    PartialSum,
    Place,
    broadcast,
    merged,
    reshaped,
    uncut,
    ways,
)
from train.plan.estimated.collectives import Sending
from train.plan.estimated.operation import SHAPES, Operation
from train.plan.estimated.products import kernel_flops, multiply

# Linear in all operands at once: partial sums may pass.
_LINEAR = SHAPES | {
    *("add", "add_any", "sub", "neg", "reduce_sum", "slice", "split", "pad"),
    "concatenate",
}


class Walk:
    """Follows a program; `operations` and `sending` hold what came of it."""

    def __init__(self, sizes: Mapping[str, int], platform: str):
        """Start on a mesh."""
        self.operations: list[Operation] = []
        self.sending = Sending(sizes, platform)
        self._times, self._scope = 1, ""
        self._looked_up: dict[Array, tuple[Dim, ...]] = {}

    @property
    def place(self) -> Place:
        """Where the walk stands."""
        return Place(self._times, self._scope, id(self.operations))

    def each(self) -> Iterator[Operation]:
        """Give all operations, those of loops too; `place` says how often they run."""
        queue = list(reversed(self.operations))
        while queue:
            operation = queue.pop()
            yield operation
            queue += reversed(operation.body)

    def run(self, jaxpr: Any, arguments: Sequence[Array]) -> list[Array]:
        """Walk a jaxpr, open or closed, and give its results."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        arrays = dict(zip(jaxpr.invars, arguments, strict=True))
        arrays |= {var: _constant(var.aval) for var in jaxpr.constvars}

        def read(atom: Any) -> Array:
            return _constant(atom.aval) if isinstance(atom, Literal) else arrays[atom]

        for equation in jaxpr.eqns:
            before, own = self._scope, str(equation.source_info.name_stack)
            self._scope = f"{before}/{own}" if own else before
            results = self._equation(equation, [read(v) for v in equation.invars])
            arrays.update(zip(equation.outvars, results, strict=True))
            self._scope = before
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[Array]) -> list[Array]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, operands)
        if name == "shard_map":
            return self._shard_map(params, operands)
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if name == "cond":
            inner, operands = params["branches"][-1], operands[1:]
        elif name == "while":  # of unknown length: once
            inner = params["body_jaxpr"]
            operands = operands[params["cond_nconsts"] :]
        if inner is None or name == "pallas_call":
            return self._plain(equation, operands)
        return self.run(inner, operands)

    def _scan(self, equation: Any, operands: list[Array]) -> list[Array]:
        """Walk a loop once; what has a dim more outside is sliced, or stacked."""
        params, inner = equation.params, equation.params["jaxpr"].jaxpr

        def same_rank(outside: Any, inside: Any) -> int:
            pairs = zip(outside, inside, strict=True)
            return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

        whole = same_rank(equation.invars, inner.invars)
        carry = same_rank(equation.outvars, inner.outvars)
        trips, fixed = params["length"], operands[:whole]
        slices = [_slice(array) for array in operands[whole:]]
        outer = self.operations
        loop = Operation("scan", operands, [], self.place, trips=trips, slices=slices)
        self.operations, self._times = loop.body, self._times * trips
        results = self.run(params["jaxpr"], [*fixed, *slices])
        self.operations, self._times = outer, self._times // trips
        loop.carried, loop.stacked = results[:carry], results[carry:]
        loop.results = loop.carried + [
            Array(
                (Dim(trips), *array.dims),
                array.itemsize,
                array.from_batch,
                array.sums,
                array.source if array.source is not array else None,
                array.label,
            )
            for array in loop.stacked
        ]
        self.operations.append(loop)
        return loop.results

    def _shard_map(self, params: Any, operands: list[Array]) -> list[Array]:
        """Walk what devices do on their own: there every dim is a device's own."""
        arguments = []
        for array, spec in zip(operands, params["in_specs"], strict=True):
            dims = self.sending.lay_out(array, spec, self.place)
            own = tuple(Dim(dim.size, (), dim.known) for dim in dims)
            arguments.append(self._renamed(array, own))
        results = list[Array]()
        inside = self.run(params["jaxpr"], arguments)
        for array, spec in zip(inside, params["out_specs"], strict=True):
            entries = self.sending.entries(spec, len(array.dims))
            pairs = zip(array.dims, entries, strict=True)
            dims = tuple(Dim(dim.size, axes) for dim, axes in pairs)
            results.append(self._renamed(array, dims))
        return results

    def _renamed(self, array: Array, dims: tuple[Dim, ...]) -> Array:
        """Give an array other axes; it stays where it is."""
        flag, sums, label = array.from_batch, array.sums, array.label
        result = Array(dims, array.itemsize, flag, sums, label=label)
        self.operations.append(Operation("shard_map", [array], [result], self.place))
        return result

    def _plain(self, equation: Any, operands: list[Array]) -> list[Array]:
        name, params, place = equation.primitive.name, equation.params, self.place
        scalars = all(array.size == 1 for array in operands[1:])
        by_scalar = name in ("mul", "div") and (scalars or operands[0].size == 1)
        linear = name in _LINEAR or by_scalar
        for array in () if linear else operands:
            self.sending.reduce(array, ())
        flops, part = 0.0, 1.0
        if name == "pallas_call":
            flops, part = kernel_flops(equation, operands)
        if name == "dot_general":
            (left, right), pairs = operands, params["dimension_numbers"]
            product = multiply(left, right, pairs, self.sending, place)
            operands, flops = product.operands, product.flops
            laid_out = [(product.dims, product.summed)]
        else:
            laid_out = self._lay_out(equation, operands)
        from_batch = any(array.from_batch for array in operands)
        kept = [p for a in operands for p in a.sums if linear and not p.reduced]
        results = []
        for var, (dims, summed) in zip(equation.outvars, laid_out, strict=True):
            array = Array(dims, var.aval.dtype.itemsize, from_batch)
            if name in SHAPES:
                array.source, array.label = operands[0].source, operands[0].label
            own, axes = list(kept), self.sending.wide(summed) if from_batch else ()
            if axes:
                is_product = name == "dot_general"
                own.append(PartialSum(axes, array.bytes, place, is_product))
            array.sums = tuple(own)
            results.append(array)
        self.operations.append(Operation(name, operands, results, place, flops, part))
        return results

    def _lay_out(
        self, equation: Any, operands: list[Array]
    ) -> list[tuple[tuple[Dim, ...], Axes]]:
        """Give each result's dims, and the axes along which it is a partial sum."""
        params = equation.params
        before = [v.aval.shape for v in equation.invars]
        after = [v.aval.shape for v in equation.outvars]
        first = operands[0].dims if operands else tuple[Dim, ...]()
        gone: Sequence[int] = ()
        match equation.primitive.name:
            case "transpose":
                return [(tuple(first[i] for i in params["permutation"]), ())]
            case "reshape":
                return [(reshaped(first, before[0], after[0]), ())]
            case "broadcast_in_dim":
                places = params["broadcast_dimensions"]
                return [(broadcast(first, before[0], after[0], places), ())]
            case "sharding_constraint":
                spec = params["sharding"].spec
                return [(self.sending.lay_out(operands[0], spec, self.place), ())]
            case "gather" if len(params["dimension_numbers"].collapsed_slice_dims) == 1:
                return [self._look_up(*operands)]
            case "scatter-add" if operands[1] in self._looked_up:
                return [self._look_back(operands[1], operands[2])]
            case "psum" | "psum_invariant" | "pmax":
                for array in operands:
                    axes = params["axes"]
                    self.sending.add(axes, "all-reduce", array.bytes, self.place)
            case "all_gather":
                return [(self._manual("all-gather", params, operands[0]), ())]
            case "reduce_scatter":
                return [(self._manual("reduce-scatter", params, operands[0]), ())]
            case "squeeze":
                gone = params["dimensions"]
            case name if name.startswith("reduce_") and "axes" in params:
                gone = params["axes"]
        if gone:
            summed = tuple(axis for i in gone for axis in first[i].axes)
            dims = tuple(dim for i, dim in enumerate(first) if i not in gone)
            return [(dims, summed)] * len(after)
        results = list[tuple[tuple[Dim, ...], Axes]]()
        for shape in after:
            dims = merged(shape, list(zip(operands, before, strict=True)))
            self._fit(dims, operands)
            results.append((dims, ()))
        return results

    def _fit(self, dims: tuple[Dim, ...], operands: list[Array]) -> None:
        """Gather parameters that are cut otherwise than what they are combined with."""
        for array in operands:
            if array.size == 1 or len(array.dims) != len(dims) or array.from_batch:
                continue
            pairs = zip(array.dims, dims, strict=True)
            lost = tuple(a for own, to in pairs for a in own.axes if a not in to.axes)
            used = {axis for dim in dims for axis in dim.axes}
            moved = tuple(axis for axis in lost if axis in used)
            if any(other.from_batch for other in operands):
                self.sending.gather(array, lost, self.place)
            elif moved:
                kind = "all-to-all"
                self.sending.add(moved, kind, array.bytes, self.place, array.label)
            else:
                self.sending.gather(array, lost, self.place)

    def _look_up(self, table: Array, ids: Array) -> tuple[tuple[Dim, ...], Axes]:
        """Look ids [..., 1] up in a table [V, ...].

        Where the batch is cut along axes that cut the table's rows, too, either the
        table is gathered or ids and rows are exchanged, whichever is less.
        """
        sizes = self.sending.sizes
        clash = [a for dim in table.dims[1:] for a in dim.axes if a in ids.axes]
        whole = tuple(uncut(dim, clash, sizes) for dim in table.dims)
        rows = (*ids.dims[:-1], *whole[1:])
        self._looked_up[ids] = whole
        num_bytes = math.prod(dim.size for dim in rows) * table.itemsize
        if clash and table.bytes * ways(sizes, clash) <= num_bytes:
            self.sending.gather(table, tuple(clash), self.place)
        elif clash:
            self.sending.exchange(tuple(clash), ids, num_bytes, self.place)
            self._looked_up[ids] = table.dims
        return rows, table.dims[0].axes

    def _look_back(self, ids: Array, rows: Array) -> tuple[tuple[Dim, ...], Axes]:
        """Add up the gradient of a table, whose parts are those that were looked up."""
        dims = self._looked_up[ids]
        exchanged = tuple(a for d in dims[1:] for a in d.axes if a in ids.axes)
        if exchanged:
            self.sending.exchange(exchanged, ids, rows.bytes, self.place)
        return dims, tuple(a for a in ids.axes if a not in exchanged)

    def _manual(self, kind: str, params: Any, array: Array) -> tuple[Dim, ...]:
        """Gather or scatter one dim, as a device's own program says."""
        axes = params["axis_name"]
        parts = ways(self.sending.sizes, axes)
        gathers = kind == "all-gather"
        at = params["all_gather_dimension" if gathers else "scatter_dimension"]
        size = array.dims[at].size
        dim = Dim(size * parts if gathers else size // parts)
        whole = array.bytes * (parts if gathers else 1)
        self.sending.add(axes, kind, whole, self.place, array.label)
        return (*array.dims[:at], dim, *array.dims[at + 1 :])


def _constant(aval: Any) -> Array:
    dims = tuple(Dim(size, (), False) for size in aval.shape)
    return Array(dims, aval.dtype.itemsize)


def _slice(array: Array) -> Array:
    return Array(array.dims[1:], array.itemsize, array.from_batch, label=array.label)
