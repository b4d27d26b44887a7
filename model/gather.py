"""The collectives of weights: gather in the forward pass, reduce-scatter of gradients.

If fsdp shards the dim D of a weight W[D, F], a device holds the shard W[D/fsdp, F]. The
forward and the backward pass each gather the weight once, in the compute dtype, and
free it after the products that use it. Each device then has the gradient dW[D, F] of
its local rows. A reduce-scatter sums this gradient over devices, in the reduce dtype,
to dW[D/fsdp, F]. If XLA's partitioner chose the collectives, the bytes that a device
sends would depend on the number of devices (docs/log).
"""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

# The size of a TPU's vectors along the last two dims.
_SUBLANES = 8
_LANES = 128
_SMALL_BYTES = 2**25  # Smaller weights use `AxisSteps.small` (docs/log).


class AxisSteps(NamedTuple):
    """The steps of gathers and scatters along a mesh axis, on TPUs.

    Each tuple has the number of devices in a group for each step. A reduce-scatter in
    steps of (p, q) first sums over p devices that are far apart, then over q
    neighbours. A gather takes the steps in reverse. The last number of a tuple is the
    number of slices that the axis crosses: neighbours along the axis are in different
    slices (train/resolve/mesh.py). `small` replaces `gather` for small weights.
    """

    axis: str
    gather: tuple[int, ...]
    small: tuple[int, ...]
    scatter: tuple[int, ...]


class CollectiveStep(NamedTuple):
    """One collective over the mesh axis `axis`, along the dim `dim` of a weight.

    The devices of each group communicate. None is one group of all devices.
    """

    dim: int
    axis: str
    groups: list[list[int]] | None


class WeightPlacement(NamedTuple):
    """The sharding of a weight, and the collectives that its use causes.

    sharded_dims: pairs (dim, manual mesh axes that shard this dim).
    replica_axes: the manual mesh axes over which the weight is replicated and
        `reduce_scatter` also sums its gradient.
    reduce_dtype: the dtype in which the gradient is summed over devices.
    automatic_spec: the sharding over automatic mesh axes.
    gather_again: whether the backward pass gathers the weight again. Otherwise the
        forward pass saves the gathered weight.
    platform: the platform that XLA compiles for.
    axis_steps: the mesh axes along which collectives take several steps.
    is_stack: whether the weight is a stack of matrices [E, D, F], one for each expert.
    has_automatic_axes: whether the program has automatic axes of several devices.
    """

    sharded_dims: tuple[tuple[int, tuple[str, ...]], ...] = ()
    replica_axes: tuple[str, ...] = ()
    reduce_dtype: DTypeLike = jnp.float32
    automatic_spec: PartitionSpec = PartitionSpec()
    gather_again: bool = False
    platform: str = "cpu"
    axis_steps: tuple[AxisSteps, ...] = ()
    is_stack: bool = False
    has_automatic_axes: bool = False

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The manual mesh axes over which the weight is sharded."""
        return tuple(axis for _, axes in self.sharded_dims for axis in axes)

    def without_dims(self, dims: Collection[int]) -> "WeightPlacement":
        """Return a placement whose `gather` leaves these dims sharded."""
        gathered_dims = tuple(pair for pair in self.sharded_dims if pair[0] not in dims)
        return self._replace(sharded_dims=gathered_dims)

    def gather(self, shard: jax.Array) -> jax.Array:
        """Return the weight, gathered over the manual axes, from its local shard."""
        if not self.sharded_dims:
            return shard
        return on_shards(self._gather, self.automatic_spec)(shard)

    def gather_as(self, shard: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the weight, rounded to `dtype` and gathered."""
        if self.sharded_dims and self.platform == "tpu" and shard.dtype == jnp.float32:
            # Otherwise XLA would round the shards of all layers before the loop over
            # layers, or transpose them all, and keep the copies until its end. It does
            # not round integers.
            bits = jax.lax.bitcast_convert_type(shard, jnp.uint32)
            # Padding would fill the lanes of fewer columns, and XLA's partitioner would
            # gather what has a fixed layout.
            if bits.shape[-1] % _LANES == 0 and not self.has_automatic_axes:
                bits = with_layout_constraint(bits, Layout(tuple(range(bits.ndim))))
            bits = jax.lax.optimization_barrier(bits)
            shard = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return self.gather(shard.astype(dtype))

    def _gather(self, weight: jax.Array) -> jax.Array:
        num_shards = math.prod(jax.lax.psum(1, axes) for _, axes in self.sharded_dims)
        form = "small" if num_shards * weight.nbytes < _SMALL_BYTES else "gather"
        for dim, axis, groups in reversed([*self._steps(form)]):
            gather = partial(
                jax.lax.all_gather, axis_name=axis, axis_index_groups=groups, tiled=True
            )
            if self.platform != "tpu":
                weight = gather(self._constrain_to_row_major(weight, dim), axis=dim)
            elif self.is_stack:
                rows = gather(stack_of_rows(weight, dim), axis=1)
                weight = stack_of_rows(rows, dim)
            else:
                weight = weight_of_rows(gather(rows_of(weight, dim)), weight.shape, dim)
        return weight

    def reduce_scatter(self, gradient: jax.Array) -> jax.Array:
        """Sum a gradient over devices, and return the local shard in the same dtype."""
        if not self.sharded_dims and not self.replica_axes:
            return gradient
        reduce = on_shards(self._reduce_scatter, self.automatic_spec)
        return reduce(gradient.astype(self.reduce_dtype)).astype(gradient.dtype)

    def _reduce_scatter(self, sums: jax.Array) -> jax.Array:
        for dim, steps in groupby(self._steps("scatter"), lambda step: step.dim):
            if self.platform == "tpu":
                scatter = _scatter_stack if self.is_stack else _scatter_rows
                sums = scatter(sums, [*steps])
                continue
            for _, axis, groups in steps:
                scatter = partial(jax.lax.psum_scatter, axis_index_groups=groups)
                sums = scatter(sums, axis, scatter_dimension=dim, tiled=True)
            sums = self._constrain_to_row_major(sums, dim)
        return jax.lax.psum(sums, self.replica_axes) if self.replica_axes else sums

    def _constrain_to_row_major(self, x: jax.Array, dim: int) -> jax.Array:
        """Constrain a weight on a GPU to the row-major layout.

        NCCL gathers and scatters along the outermost dim of the layout. Without the
        constraint, XLA:GPU would choose a layout with `dim` outermost, and transpose
        the weights of all layers at once, before and after the loop over layers.
        """
        if self.platform != "gpu" or dim == 0:
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def _steps(
        self, form: Literal["gather", "small", "scatter"]
    ) -> Iterator[CollectiveStep]:
        """Yield the steps of a gather or a scatter, in the order of a scatter."""
        group_sizes = {steps.axis: getattr(steps, form) for steps in self.axis_steps}
        for dim, axes in self.sharded_dims:
            for axis in axes:
                for groups in scatter_groups(group_sizes.get(axis, ())):
                    yield CollectiveStep(dim, axis, groups)


UNSHARDED = WeightPlacement()


def on_shards(
    function: Callable[[jax.Array], jax.Array], automatic_spec: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Return `function` mapped over the shards of the automatic axes.

    `automatic_spec` is the sharding of the argument and of the result. Without
    `shard_map`, XLA's partitioner would gather the argument over its automatic axes
    before a collective over manual axes.
    """
    if not any(automatic_spec):
        return function
    return jax.shard_map(
        function, in_specs=automatic_spec, out_specs=automatic_spec, check_vma=False
    )


def _scatter_rows(sums: jax.Array, steps: list[CollectiveStep]) -> jax.Array:
    """Reduce-scatter along one dim, on a TPU."""
    dim = steps[0].dim
    shape = sums.shape
    rows = rows_of(sums, dim)
    size = rows.shape[-1]
    padding = -size % padding_multiple(size)
    # Pad once for all steps: padding between steps costs more passes (docs/log).
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padding)])
    for _, axis, groups in steps:
        # In row-major order, the first dim is not along lanes. XLA would replace a
        # scatter along lanes by an all-reduce.
        rows = with_layout_constraint(rows, Layout(tuple(range(rows.ndim))))
        rows = jax.lax.psum_scatter(rows, axis, tiled=True, axis_index_groups=groups)
    return weight_of_rows(rows[..., :size], shape, dim)


def _scatter_stack(sums: jax.Array, steps: list[CollectiveStep]) -> jax.Array:
    """Reduce-scatter each matrix of a stack along one dim, on a TPU."""
    dim = steps[0].dim
    stack = stack_of_rows(sums, dim)
    for _, axis, groups in steps:
        stack = with_layout_constraint(stack, Layout((0, 1, 2)))
        stack = jax.lax.psum_scatter(
            stack, axis, scatter_dimension=1, axis_index_groups=groups, tiled=True
        )
    return stack_of_rows(stack, dim)


def stack_of_rows(x: jax.Array, dim: int) -> jax.Array:
    """Return a stack of matrices [E, D, F] with `dim` as dim 1; its own inverse.

    The order of a kernel's matrices in memory is fixed, and moving `dim` to the front
    would copy them.
    """
    return x.swapaxes(1, dim)


def rows_of(x: jax.Array, dim: int) -> jax.Array:
    """Return x with `dim` first, for a gather or a scatter along `dim` on a TPU.

    Collectives should not divide the last dim, which is along lanes. If the last two
    dims fill vectors only in part (heads of 64 dims, or four heads), all dims but the
    first are merged. Otherwise the padding of vectors would be sent too, and XLA would
    replace a scatter by an all-reduce.
    """
    x = jnp.moveaxis(x, dim, 0)
    partial_vectors = x.ndim > 2 and (x.shape[-2] % _SUBLANES or x.shape[-1] % _LANES)
    return x.reshape(len(x), -1) if partial_vectors else x


def weight_of_rows(rows: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Undo `rows_of`. `shape` is the weight's shape; its size of `dim` is not used."""
    row_shape = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(rows.reshape(-1, *row_shape), 0, dim)


def scatter_groups(sizes: tuple[int, ...]) -> list[list[list[int]] | None]:
    """Return the groups of devices along an axis for each step of a scatter.

    The first steps are between devices that are far apart, the later steps between
    neighbours, so that device i ends with shard i. The step between slices is the last
    one, when each chip has the least to send. `sizes` has the size of a group in each
    step; () means one step. In the result, None means one group of all devices.
    """
    steps = [n for n in sizes if n > 1]
    if len(steps) < 2:
        return [None]
    devices = np.arange(math.prod(steps)).reshape(steps)
    return [
        np.moveaxis(devices, i, -1).reshape(-1, n).tolist() for i, n in enumerate(steps)
    ]


def padding_multiple(size: int) -> int:
    """Return the padding multiple for the last dim of a TPU reduce-scatter.

    XLA halves this dim until it has at most about 90 tiles of 128 lanes. If XLA cannot
    halve the dim, it replaces the scatter by an all-reduce (docs/log).
    """
    tiles = size / _LANES
    return _LANES * 2 ** math.ceil(math.log2(tiles / 64)) if tiles > 64 else 1
