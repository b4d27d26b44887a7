"""Apply a function to whole matrices of sharded parameters, each on one device.

A device holds the local part W[D/fsdp, F/tensor] of a weight W[D_fsdp, F_tensor]. A
function of the whole matrix needs all parts on one device, but not on every device. So
each device takes some matrices (train/optimizers/assignment.py): one all-to-all brings
the parts of these matrices to the device, and another all-to-all returns the parts of
the results. No device gathers all matrices, and more devices do less work each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from model.axes import mesh_axes
from train.core.shards import num_shards
from train.optimizers.assignment import Matrices, Rounds, assign
from train.optimizers.matrix_dims import MatrixDims


def map_whole_matrices(
    function: Callable[[jax.Array], jax.Array],
    arrays: list[jax.Array],
    *,
    dims: Sequence[MatrixDims],
    specs: list[PartitionSpec],
    mesh: Mesh,
    dtype: DTypeLike,
) -> list[jax.Array]:
    """Return function(matrix) for every matrix of some float32 parameters.

    Args:
        function: maps float32 stacks [L, I, O], matrix by matrix. It must commute with
            padding by zeros, with permutations of rows or columns, and with transposes.
        arrays: the parameters.
        dims: the dims of each parameter's matrices.
        specs: the sharding of each parameter on the mesh.
        mesh: the devices that share the work.
        dtype: the dtype in which parts are exchanged.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    layouts = [
        _make_layout(array.shape, param_dims, spec, sizes)
        for array, param_dims, spec in zip(arrays, dims, specs, strict=True)
    ]

    def map_local_parts(arrays: list[jax.Array]) -> list[jax.Array]:
        parts = [layout.flatten(x) for layout, x in zip(layouts, arrays, strict=True)]
        for axes in dict.fromkeys(layout.axes for layout in layouts):
            indices = [i for i, layout in enumerate(layouts) if layout.axes == axes]
            exchange = _Exchange(function, axes, sizes, dtype)
            results = exchange.apply([parts[i] for i in indices])
            for i, result in zip(indices, results, strict=True):
                parts[i] = result
        return [
            layout.unflatten(part.astype(array.dtype), array.shape)
            for layout, part, array in zip(layouts, parts, arrays, strict=True)
        ]

    return jax.shard_map(
        map_local_parts, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )(arrays)


class _ShardAxes(NamedTuple):
    """The mesh axes that shard a stack of matrices, their rows and their columns."""

    stack: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class _Layout(NamedTuple):
    """How a parameter is viewed as a stack of matrices.

    dims: the parameter's dims.
    transposed: whether outputs are the rows. Transposing lets matrices whose inputs and
        outputs have swapped shardings share one exchange.
    axes: the mesh axes that shard the stack, its rows and its columns.
    """

    dims: MatrixDims
    transposed: bool
    axes: _ShardAxes

    def flatten(self, part: jax.Array) -> jax.Array:
        """Return a parameter, or a part of it, as [matrices, rows, columns]."""
        return self._transpose(self.dims.to_stack(part))

    def unflatten(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return an array of this shape from [matrices, rows, columns]."""
        return self.dims.from_stack(self._transpose(x), shape)

    def _transpose(self, x: jax.Array) -> jax.Array:
        """Convert [matrices, inputs, outputs] to [matrices, rows, columns], or back."""
        return x.swapaxes(1, 2) if self.transposed else x


def _make_layout(
    shape: tuple[int, ...], dims: MatrixDims, spec: PartitionSpec, sizes: dict[str, int]
) -> _Layout:
    def axes_of(some_dims: tuple[int, ...]) -> tuple[str, ...]:
        entries = [tuple(spec)[dim] for dim in some_dims if dim < len(spec)]
        return tuple(a for entry in entries for a in mesh_axes(entry) if a in sizes)

    inputs = axes_of(dims.inputs)
    outputs = axes_of(dims.outputs)
    fan_in, fan_out = dims.fans(shape)
    transposed = (outputs, fan_out) > (inputs, fan_in)
    rows, columns = (outputs, inputs) if transposed else (inputs, outputs)
    return _Layout(dims, transposed, _ShardAxes(axes_of(dims.stack), rows, columns))


class _Exchange(NamedTuple):
    """Applies a function to parameters that are sharded over the same mesh axes."""

    function: Callable[[jax.Array], jax.Array]
    axes: _ShardAxes
    sizes: Mapping[str, int]
    dtype: DTypeLike

    def apply(self, parts: list[jax.Array]) -> list[jax.Array]:
        """Map local parts [matrices, rows, columns] to parts of the function's results.

        Devices along axes that shard nothing have the same parts. If sharing the work
        saves time, these devices take different matrices and gather the results.
        """
        num_rows = self._num_shards(self.axes.rows)
        num_columns = self._num_shards(self.axes.columns)
        sharded = {axis for axes in self.axes for axis in axes}
        replica_sizes = {a: n for a, n in self.sizes.items() if a not in sharded}
        matrices = [Matrices(*part.shape) for part in parts]
        work_axes, all_rounds = assign(matrices, (num_rows, num_columns), replica_sizes)
        results = [list[jax.Array]() for _ in parts]
        for rounds in all_rounds:
            x = [parts[s.parameter][s.start : s.stop] for s in rounds.spans]
            x = jnp.concatenate([_pad(part.astype(self.dtype), rounds) for part in x])
            y = self._apply_in_rounds(x, rounds, work_axes)
            for span in rounds.spans:
                count = span.stop - span.start
                result = y[:count]
                y = y[count:]
                rows, columns = parts[span.parameter].shape[1:]
                results[span.parameter].append(result[:, :rows, :columns])
        return [jnp.concatenate(result) for result in results]

    def _num_shards(self, axes: tuple[str, ...]) -> int:
        return num_shards(self.sizes, axes)

    def _apply_in_rounds(
        self, x: jax.Array, rounds: Rounds, work_axes: tuple[str, ...]
    ) -> jax.Array:
        """Map local parts [matrices, rows, columns] of one size to the results' parts.

        Matrices are ordered by round, then by device (its index along `work_axes`,
        then along the sharding axes), then within the device's batch of a round.
        """
        sharding_axes = self.axes.rows + self.axes.columns
        row_shards = self._num_shards(self.axes.rows)
        column_shards = self._num_shards(self.axes.columns)
        shape = (
            *(rounds.count, self._num_shards(work_axes), row_shards * column_shards),
            *(rounds.batch, *x.shape[1:]),
        )
        count = len(x)
        x = jnp.pad(x, [(0, math.prod(shape[:4]) - count), (0, 0), (0, 0)])
        x = x.reshape(shape)
        if work_axes:
            index = jax.lax.axis_index(work_axes)
            x = jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)
        else:
            x = x[:, 0]

        def run_round(x: jax.Array) -> jax.Array:
            if sharding_axes:
                # Turn one part of all matrices into all parts of the local matrices.
                x = jax.lax.all_to_all(x, sharding_axes, 0, 0)
            blocks = x.reshape(row_shards, column_shards, *x.shape[1:])
            blocks = blocks.transpose(2, 0, 3, 1, 4)
            matrices = blocks.reshape(
                rounds.batch, rounds.rows * row_shards, rounds.columns * column_shards
            )
            y = self.function(matrices.astype(jnp.float32)).astype(x.dtype)
            y = y.reshape(blocks.shape).transpose(1, 3, 0, 2, 4).reshape(x.shape)
            return jax.lax.all_to_all(y, sharding_axes, 0, 0) if sharding_axes else y

        y = jax.lax.map(run_round, x) if rounds.count > 1 else run_round(x[0])[None]
        y = jax.lax.all_gather(y, work_axes, axis=1) if work_axes else y
        return y.reshape(-1, *shape[4:])[:count]


def _pad(x: jax.Array, rounds: Rounds) -> jax.Array:
    _, rows, columns = x.shape
    return jnp.pad(x, [(0, 0), (0, rounds.rows - rows), (0, rounds.columns - columns)])
