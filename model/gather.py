"""The one way to bring a weight together, and its gradient back to its parts.

Of a weight W[D_fsdp, F] a device holds W[D/fsdp, F]. It is gathered where it is used,
once a pass, in the compute dtype, and lives no longer than its products. The gradient
dW[D, F] of a device's own rows is added up over devices by a scatter, in the reduce
dtype, to dW[D/fsdp, F]. Left to XLA's partitioner the form of both, and with it the
bytes, changes with the number of devices (docs/log.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from model.execution import AxisSteps, Execution

_SUBLANES, _LANES = 8, 128  # of a TPU's vectors, along the last two dims
_SMALL = 2**25  # bytes of a small weight (docs/log.md)


Step = tuple[int, str, list | None]  # dim, mesh axis, groups along it; None: all


class Parts(NamedTuple):
    """How a weight lies in parts.

    cut: pairs of a dim and the mesh axes along which it is cut.
    copies: mesh axes along which other devices have the same part, and whose gradients
        are added up with the scatter.
    reduce: dtype of the gradient between devices.
    place: of the weight along the mesh axes that XLA takes care of.
    gather_again: in the backward pass, instead of keeping what was gathered.
    platform: for which XLA compiles it.
    steps: of gathers and scatters along mesh axes; along others they take one step.
    """

    cut: tuple[tuple[int, tuple[str, ...]], ...] = ()
    copies: tuple[str, ...] = ()
    reduce: DTypeLike = jnp.float32
    place: PartitionSpec = PartitionSpec()
    gather_again: bool = False
    platform: str = "cpu"
    steps: tuple[AxisSteps, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it is cut."""
        return tuple(axis for _, axes in self.cut for axis in axes)

    @property
    def on_tpu(self) -> bool:
        """Whether XLA:TPU compiles it."""
        return self.platform == "tpu"

    def gather(self, part: jax.Array) -> jax.Array:
        """Bring a weight together."""
        return on_shards(self._gather, self.place)(part) if self.cut else part

    def _gather(self, part: jax.Array) -> jax.Array:
        parts = math.prod(jax.lax.psum(1, axes) for _, axes in self.cut)
        form = "small" if parts * part.nbytes < _SMALL else "gather"
        for dim, axis, groups in reversed([*self._steps(form)]):
            how = {"tiled": True, "axis_index_groups": groups}
            if self.on_tpu:
                rows = jax.lax.all_gather(rows_of(part, dim), axis, **how)
                part = from_rows(rows, part.shape, dim)
            else:
                part = self._in_order(part, dim)
                part = jax.lax.all_gather(part, axis, axis=dim, **how)
        return part

    def scatter(self, whole: jax.Array) -> jax.Array:
        """Add up over devices, each of which keeps its part; the dtype stays."""
        if not self.cut and not self.copies:
            return whole
        sums = on_shards(self._scatter, self.place)(whole.astype(self.reduce))
        return sums.astype(whole.dtype)

    def _scatter(self, sums: jax.Array) -> jax.Array:
        for dim, steps in groupby(self._steps("scatter"), itemgetter(0)):
            if self.on_tpu:
                sums = _scatter_rows(sums, steps)
                continue
            for _, axis, groups in steps:
                how = {"tiled": True, "axis_index_groups": groups}
                sums = jax.lax.psum_scatter(sums, axis, scatter_dimension=dim, **how)
            sums = self._in_order(sums, dim)
        if self.copies:
            sums = jax.lax.psum(sums, self.copies)
        return sums

    def _in_order(self, part: jax.Array, dim: int) -> jax.Array:
        """Hold a part in the order of its dims, on GPUs.

        NCCL gathers and scatters along the outermost dim. To have another one there
        XLA:GPU turns round all layers' parts at once, before and behind their loop.
        """
        if self.platform != "gpu" or dim == 0:
            return part
        return with_layout_constraint(part, Layout(tuple(range(part.ndim))))

    def _steps(self, form: Literal["gather", "small", "scatter"]) -> Iterator[Step]:
        """Return the steps of a gather or a scatter, in the order of a scatter."""
        sizes = {steps.axis: getattr(steps, form) for steps in self.steps}
        for dim, axes in self.cut:
            for axis in axes:
                for groups in nested(sizes.get(axis, ())):
                    yield dim, axis, groups


WHOLE = Parts()


def parts_of(axes: tuple[str, ...], how: Execution) -> Parts:
    """Return how a weight with these logical axes lies."""
    cut = how.rules.cut(axes)
    copies = how.rules.copies(axes) if how.reduces_copies else ()
    again, travel = how.remat == "none", (how.platform, how.steps)
    place = how.rules.param_spec(axes)
    if any(place[dim] for dim, _ in cut):  # there the order of parts is XLA's
        place = PartitionSpec()
    return Parts(cut, copies, how.reduce_dtype, place, bool(cut) and again, *travel)


def on_shards(
    function: Callable[[jax.Array], jax.Array], place: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Let a function see a device's own shard of an array alone.

    XLA's partitioner brings an array together along its own axes before a gather or
    a scatter along others that are by hand.

    Args:
        function: gathers, scatters or adds up along axes by hand.
        place: of array and result along the other axes.
    """
    if not any(place):
        return function
    return jax.shard_map(function, in_specs=place, out_specs=place, check_vma=False)


def _scatter_rows(sums: jax.Array, steps: Iterable[Step]) -> jax.Array:
    """Scatter along one dim, on a TPU."""
    (dim, *_), *_ = steps = [*steps]
    shape, rows = sums.shape, rows_of(sums, dim)
    size = rows.shape[-1]
    # For all steps: what is cut and padded again XLA adds up.
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -size % multiple(size))])
    for _, axis, groups in steps:
        # Along lanes it would be an all-reduce.
        rows = with_layout_constraint(rows, Layout(tuple(range(rows.ndim))))
        rows = jax.lax.psum_scatter(rows, axis, tiled=True, axis_index_groups=groups)
    return from_rows(rows[..., :size], shape, dim)


def rows_of(x: jax.Array, dim: int) -> jax.Array:
    """Put the dim first along which a TPU gathers or scatters.

    It had better not cut its lanes, the last dim. Where the last two dims fill vectors
    in part (heads of 64 dims, or four heads), all but the first become one: what is
    empty would travel too, and XLA would make an all-reduce of a scatter.
    """
    x = jnp.moveaxis(x, dim, 0)
    partial = x.ndim > 2 and (x.shape[-2] % _SUBLANES or x.shape[-1] % _LANES)
    return x.reshape(len(x), -1) if partial else x


def from_rows(rows: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Undo `rows_of` an array of this shape, whatever became of the number of rows."""
    others = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(rows.reshape(len(rows), *others), 0, dim)


def nested(sizes: tuple[int, ...]) -> list[list[list[int]] | None]:
    """Group the devices along an axis for the steps of a scatter over all.

    First devices far apart share what there is, then those close by, so that device i
    ends with part i. Last come the slices, when each chip is left with the least.

    Args:
        sizes: the number of devices in a group of each step; (): one step.

    Returns:
        The groups of each step; None stands for one group of all devices.
    """
    steps = [n for n in sizes if n > 1]
    if len(steps) < 2:
        return [None]
    devices = np.arange(math.prod(steps)).reshape(steps)
    return [
        np.moveaxis(devices, i, -1).reshape(-1, n).tolist() for i, n in enumerate(steps)
    ]


def multiple(size: int) -> int:
    """Return what the last dim of what a TPU scatters must be a multiple of.

    XLA cuts it in two until at most some 90 tiles of lanes are left, and makes an
    all-reduce of what it cannot cut (docs/log.md).
    """
    tiles = size / _LANES
    return _LANES * 2 ** math.ceil(math.log2(tiles / 64)) if tiles > 64 else 1
