"""The placement of a program's arrays on the mesh, as the model sees it.

The mesh axes that shard the batch are manual: the program runs on each device's part of
the batch (train/core/rows.py), and states each gather and each reduction over these
axes. The other axes are automatic, which means that XLA's partitioner handles them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from model.axes import AxisRules, mesh_axes
from model.gather import AxisSteps


@dataclass(frozen=True)
class Placement:
    """The placement of a program's arrays. Without a mesh, there is one device.

    platform: the platform that XLA compiles for: cpu, gpu or tpu.
    axis_steps: the mesh axes along which collectives take several steps.
    reduce_in_layers: whether gradients of matrices are summed over replicas in each
        backward pass. Otherwise the step sums them once, after all microbatches.
    exchange_embedding_rows: whether devices that share an embedding table exchange the
        rows that they look up, instead of gathering the table.
    microbatch_shape: the rows and their positions that a device has in a microbatch.
    scatters_tables: whether many devices share the rows of a table [V, D] along D, and
        no devices share them otherwise. To estimate, a program is traced on another
        mesh.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: AxisRules = AxisRules()  # noqa: RUF009
    platform: str = "cpu"
    axis_steps: tuple[AxisSteps, ...] = ()
    reduce_in_layers: bool = False
    exchange_embedding_rows: bool = False
    microbatch_shape: tuple[int, int] | None = None
    scatters_tables: bool = False

    @cached_property
    def _nontrivial_axes(self) -> tuple[str, ...]:
        """The mesh axes that have more than one device."""
        sizes = {} if self.mesh is None else self.mesh.shape
        return tuple(axis for axis, size in sizes.items() if size > 1)

    def _axes_by_dim(self, spec: PartitionSpec) -> list[tuple[str, ...]]:
        """Return the mesh axes of more than one device that shard each dim."""
        nontrivial = self._nontrivial_axes
        return [tuple(a for a in mesh_axes(entry) if a in nontrivial) for entry in spec]

    @cached_property
    def _batch_axes_by_dim(self) -> list[tuple[str, ...]]:
        if not self._nontrivial_axes or not self.rules.activations:
            return [(), ()]
        return self._axes_by_dim(self.rules.spec("batch", "seq"))

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different parts of the batch."""
        axes = {axis for dim_axes in self._batch_axes_by_dim for axis in dim_axes}
        return tuple(axis for axis in self._nontrivial_axes if axis in axes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different positions of one row."""
        return self._batch_axes_by_dim[1]

    @cached_property
    def automatic_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device that XLA's partitioner handles."""
        return tuple(a for a in self._nontrivial_axes if a not in self.batch_axes)

    @property
    def manual_axes(self) -> set[str]:
        """The manual axes of the program; none if nothing shards the batch."""
        if self.mesh is None or not self.batch_axes:
            return set()
        return {*self.mesh.axis_names} - {*self.automatic_axes}

    @property
    def stage_axis(self) -> str | None:
        """The mesh axis of a pipeline's stages, or None without a pipeline."""
        axes = [axis for _, axes in self.sharded_dims(("layers",)) for axis in axes]
        assert len(axes) <= 1
        return axes[0] if axes else None

    @property
    def without_stages(self) -> "Placement":
        """The placement of layers that do not belong to a pipeline's stages."""
        params = dict(self.rules.params)
        if "layers" in params:
            params["layers"] = None
        return replace(self, rules=self.rules._replace(params=tuple(params.items())))

    @property
    def layer_batch_axes(self) -> tuple[str, ...]:
        """The batch axes along which devices have the same layers."""
        return self.replica_axes(("layers",))

    def sharded_dims(
        self, axes: tuple[str | None, ...]
    ) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return (dim, mesh axes) for each dim of a parameter that batch axes shard."""
        if not self.batch_axes:
            return ()
        pairs = []
        for dim, dim_axes in enumerate(self._axes_by_dim(self.rules.param_spec(axes))):
            batch_axes = tuple(a for a in dim_axes if a in self.batch_axes)
            pairs += [(dim, batch_axes)] if batch_axes else []
        return tuple(pairs)

    def replica_axes(self, axes: tuple[str | None, ...]) -> tuple[str, ...]:
        """Return the batch axes along which a parameter is replicated."""
        sharded = {a for _, dim_axes in self.sharded_dims(axes) for a in dim_axes}
        return tuple(axis for axis in self.batch_axes if axis not in sharded)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return an activation's PartitionSpec over the automatic axes."""
        if not self.automatic_axes:
            return PartitionSpec()
        return self._automatic_spec(self.rules.spec(*axes))

    def param_spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return a parameter's PartitionSpec over the automatic axes."""
        if not self.automatic_axes:
            return PartitionSpec(*[None] * len(axes))
        return self._automatic_spec(self.rules.param_spec(axes))

    def _automatic_spec(self, spec: PartitionSpec) -> PartitionSpec:
        axes_by_dim = (
            tuple(a for a in dim_axes if a in self.automatic_axes)
            for dim_axes in self._axes_by_dim(spec)
        )
        return PartitionSpec(
            *(axes[0] if len(axes) == 1 else axes or None for axes in axes_by_dim)
        )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an activation's sharding over the automatic axes."""
        if not self.automatic_axes:
            return x
        spec = self.spec(*axes)
        assert self.mesh is not None
        sharding = spec if self.batch_axes else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(x, sharding)

    def map_shards(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function` mapped over the shards of the automatic axes.

        XLA's partitioner does not look inside `function`.
        """
        return jax.shard_map(
            function,
            # Inside the per-device program, JAX only accepts that program's mesh. None
            # stands for this mesh.
            mesh=None if self.batch_axes else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


ONE_DEVICE = Placement()
