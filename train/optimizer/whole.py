"""Whole matrices, each on one device, of parameters that lie in parts.

Of a weight W[D_fsdp, F_tensor] a device holds the part W[D/fsdp, F/tensor]. A function
of the whole matrix needs all parts in one place, but not everywhere: each device takes
some matrices (train/optimizer/packing.py), the parts travel to it in one exchange, and
those of the result travel back. So the more devices there are the less each of them
sends and computes, and no device ever gathers all matrices.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from model.axes import mesh_axes
from model.params import ParamInfo
from train.mesh_sizes import num_shards
from train.optimizer.packing import Matrices, Rounds, deal

Function = Callable[[jax.Array], jax.Array]


def on_whole_matrices(
    function: Function,
    arrays: list[jax.Array],
    infos: Sequence[ParamInfo],
    places: list[PartitionSpec],
    mesh: Mesh,
    dtype: DTypeLike,
) -> list[jax.Array]:
    """Return function(matrix) of every matrix of some parameters.

    Args:
        function: of float32 stacks [L, I, O], matrix by matrix. Where rows or columns
            are zero, or in another order, or each other's, so is its result.
        arrays: float32, of the parameters' shapes.
        infos: what is known of the parameters.
        places: where each lies on the mesh.
        mesh: of the devices that share the work.
        dtype: in which parts travel.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    stacks = [
        Stack.of(array.shape, info, spec, sizes)
        for array, info, spec in zip(arrays, infos, places, strict=True)
    ]

    def on_device(arrays: list[jax.Array]) -> list[jax.Array]:
        parts = [s.flat(array) for s, array in zip(stacks, arrays, strict=True)]
        for cut in dict.fromkeys(stack.cut for stack in stacks):
            same_cut = [i for i, stack in enumerate(stacks) if stack.cut == cut]
            results = _in_rounds(
                function, [parts[i] for i in same_cut], cut, sizes, dtype
            )
            for i, result in zip(same_cut, results, strict=True):
                parts[i] = result
        return [
            stack.unflat(part).astype(array.dtype).reshape(array.shape)
            for stack, part, array in zip(stacks, parts, arrays, strict=True)
        ]

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(places,), out_specs=places, check_vma=False
    )(arrays)


class Cut(NamedTuple):
    """The wide mesh axes that cut a stack of matrices, their rows, their columns."""

    stack: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class Stack(NamedTuple):
    """A parameter as a stack of matrices.

    first, split: the dims at which a matrix' inputs and its outputs begin.
    turned: whether outputs are the rows, so that matrices with one sharding look equal.
    cut: how it is sharded.
    """

    first: int
    split: int
    turned: bool
    cut: Cut

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        info: ParamInfo,
        place: PartitionSpec,
        sizes: dict[str, int],
    ) -> "Stack":
        """Return how a parameter lies on a mesh with these wide axes."""
        first, split = info.stack, info.split

        def wide(dims: slice) -> tuple[str, ...]:
            entries = tuple(place)[dims]
            return tuple(a for entry in entries for a in mesh_axes(entry) if a in sizes)

        inputs, outputs = wide(slice(first, split)), wide(slice(split, None))
        fans = math.prod(shape[first:split]), math.prod(shape[split:])
        turned = (outputs, fans[1]) > (inputs, fans[0])
        rows, columns = (outputs, inputs) if turned else (inputs, outputs)
        return cls(first, split, turned, Cut(wide(slice(first)), rows, columns))

    def flat(self, part: jax.Array) -> jax.Array:
        """Return a parameter, or a part of it, as [matrices, rows, columns]."""
        fan_in = math.prod(part.shape[self.first : self.split])
        fan_out = math.prod(part.shape[self.split :])
        return self.unflat(part.reshape(-1, fan_in, fan_out))

    def unflat(self, x: jax.Array) -> jax.Array:
        """Return [matrices, rows, columns] as [matrices, inputs, outputs]."""
        return x.swapaxes(1, 2) if self.turned else x


def _in_rounds(
    function: Function,
    parts: list[jax.Array],
    cut: Cut,
    sizes: dict[str, int],
    dtype: DTypeLike,
) -> list[jax.Array]:
    """Return a device's parts [matrices, rows, columns] of the function's results.

    Devices along axes that cut nothing have the same parts. Where it makes rounds
    fewer they take other matrices, and tell each other the results.
    """
    ways = num_shards(sizes, cut.rows), num_shards(sizes, cut.columns)
    free = {axis: n for axis, n in sizes.items() if all(axis not in c for c in cut)}
    copies, dealt = deal([Matrices(*part.shape) for part in parts], ways, free)
    results = [list[jax.Array]() for _ in parts]
    for rounds in dealt:
        local_runs = [parts[run.parameter][run.start : run.stop] for run in rounds.runs]
        x = jnp.concatenate(
            [_padded(part.astype(dtype), rounds) for part in local_runs]
        )
        y = _exchanged(function, x, rounds=rounds, cut=cut, copies=copies, sizes=sizes)
        for run in rounds.runs:
            part, y = y[: run.stop - run.start], y[run.stop - run.start :]
            rows, columns = parts[run.parameter].shape[1:]
            results[run.parameter].append(part[:, :rows, :columns])
    return [jnp.concatenate(result) for result in results]


def _padded(x: jax.Array, rounds: Rounds) -> jax.Array:
    _, rows, columns = x.shape
    return jnp.pad(x, [(0, 0), (0, rounds.rows - rows), (0, rounds.columns - columns)])


def _exchanged(
    function: Function,
    x: jax.Array,
    rounds: Rounds,
    cut: Cut,
    copies: tuple[str, ...],
    sizes: dict[str, int],
) -> jax.Array:
    """Return the parts of the function's results, for parts [matrices, rows, columns].

    Matrices are numbered by round, then by the device that takes them (its place along
    `copies`, then along the axes of the cut), then within its batch.
    """
    owners = cut.rows + cut.columns
    ways = [num_shards(sizes, axes) for axes in (copies, cut.rows, cut.columns)]
    shape = (rounds.number, ways[0], ways[1] * ways[2], rounds.batch, *x.shape[1:])
    count = len(x)
    x = jnp.pad(x, [(0, math.prod(shape[:4]) - count), (0, 0), (0, 0)]).reshape(shape)
    if copies:
        replica = jax.lax.axis_index(copies)
        x = jax.lax.dynamic_index_in_dim(x, replica, axis=1, keepdims=False)
    else:
        x = x[:, 0]

    def one_round(x: jax.Array) -> jax.Array:
        if owners:
            # Parts of each device's matrices become all parts of the own ones.
            x = jax.lax.all_to_all(x, owners, 0, 0)
        gathered = x.reshape(*ways[1:], *x.shape[1:]).transpose(2, 0, 3, 1, 4)
        matrices = gathered.reshape(
            rounds.batch, shape[4] * ways[1], shape[5] * ways[2]
        )
        y = function(matrices.astype(jnp.float32)).astype(x.dtype)
        y = y.reshape(gathered.shape).transpose(1, 3, 0, 2, 4).reshape(x.shape)
        return jax.lax.all_to_all(y, owners, 0, 0) if owners else y

    y = jax.lax.map(one_round, x) if rounds.number > 1 else one_round(x[0])[None]
    y = jax.lax.all_gather(y, copies, axis=1) if copies else y
    return y.reshape(-1, *shape[4:])[:count]
