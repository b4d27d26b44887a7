"""Walk the gradients and the update of one device's step."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from model.choices import ExpertExchange
from model.parts.experts.grouped import tile_of
from model.parts.kernels.cudnn import value_padding
from train.core.layout import bytes_per_device
from train.core.optimizer.update import Optimizer
from train.hardware.chips import chip_of
from train.plan.cost import Flops
from train.plan.estimated.arrays import Dim, LocalArray, Operation, Work, flatten_loops
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.trace import trace_gradients, trace_update
from train.plan.estimated.walk import Walk
from train.resolve.program import ConfiguredProgram


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step.

    body: the operations outside loops, and the loops: first those of the gradients of
        all microbatches, then those of the update.
    exchanges: the collectives of the whole step.
    """

    program: ConfiguredProgram
    body: list[Operation]
    exchanges: list[Exchange]

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.program.config.train.accumulation_steps

    @property
    def tokens(self) -> int:
        """The number of a device's tokens in a microbatch."""
        shards = self.program.batch_shards
        num_parts = self.microbatches * shards.rows * shards.sequence
        return self.program.tokens_per_step // num_parts

    @property
    def operations(self) -> list[Operation]:
        """All operations, including those in the bodies of loops."""
        return [*flatten_loops(self.body)]

    @property
    def layers(self) -> list[Operation]:
        """The loops over the layers, forward and backward."""
        return [*_layer_loops(self.body)]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a device's gradients in float32."""
        params = jax.tree.leaves(self.program.state.params)
        return sum(4 * bytes_per_device(p) // p.dtype.itemsize for p in params)

    @functools.cached_property
    def flops(self) -> defaultdict[str, Flops]:
        """The FLOPs of matrix products and attention kernels, by section."""
        by_section = defaultdict[str, Flops](Flops)
        for op in self.operations:
            if op.work:
                is_kernel = op.name == "pallas_call"
                count = self._attention_flops if is_kernel else self._product_flops
                by_section[op.position.section] += count(op, op.work)
        return by_section

    def _product_flops(self, op: Operation, work: Work) -> Flops:
        flops = op.position.count * work.flops
        padded = flops * self._padding(work.dims)
        grouped = 0.0
        tiles = 0.0
        if op.name == "ragged_dot_general":
            used_fraction = self._used_fraction(op)
            flops = grouped = flops * used_fraction
            padded = tiles = flops * self._tile_padding(op, used_fraction)
        return Flops(
            flops,
            eight_bits=flops if all(a.itemsize == 1 for a in op.operands[:2]) else 0.0,
            grouped=grouped,
            grouped_tiles=tiles,
            padded=padded,
        )

    def _attention_flops(self, op: Operation, work: Work) -> Flops:
        flops = op.position.count * work.flops
        computed = work.computed
        model = self.program.config.model
        H = model.head_size
        V = model.value_size
        kernel = self.program.execution.attention.kernel
        if kernel.is_cudnn:
            # The traced kernel is Splash's, with values that are not padded. Backward,
            # Splash has two kernels, and each recomputes the scores and their
            # cotangent; cuDNN recomputes the scores and computes four gradients.
            padded_V = V + value_padding(kernel, H, V)
            if op.position.is_backward:
                flops *= (3 * H + 2 * padded_V) / (4 * H + 3 * V)
            else:
                flops *= (H + padded_V) / (H + V)
            # cuDNN computes half of a causal square, for any size of blocks.
            computed = computed if computed == 1 else min(computed, 0.5)
        useful = flops * computed
        padded = useful * (H * self._padding([H]) + V * self._padding([V])) / (H + V)
        return Flops(attention=useful, whole_attention=flops, padded=padded)

    def _used_fraction(self, grouped: Operation) -> float:
        """Return the fraction of rows that a grouped product uses if loads are equal.

        Rows that are sent fill a part of a device's capacity. Gathered rows include the
        choices of other devices' experts (model/parts/experts/exchange.py).
        """
        model = self.program.config.model
        execution = self.program.execution
        rows, _, sizes = grouped.operands
        num_local = sizes.dims[0].size
        k = model.experts_per_token
        is_gathered = execution.expert_exchange is ExpertExchange.all_gather
        if not is_gathered and num_local < model.num_experts:
            return self.tokens * k / rows.dims[0].size
        return k * num_local / (model.num_experts * min(k, num_local))

    def _tile_padding(self, grouped: Operation, used_fraction: float) -> float:
        """Return the FLOPs of a grouped product's tiles over its useful FLOPs.

        Where the rows of one expert end within a tile, the tile is computed once more
        for the next expert. So narrow experts with few rows each cost more.
        """
        rows, other, sizes = grouped.operands
        num_rows = rows.dims[0].size
        tile_rows, tile_columns = tile_of(self.program.execution.grouped, num_rows)
        if len(other.dims) == 3:  # The other operand is the matrices [E, D, F].
            matrix = other.dims[1:]
        else:  # Their gradient multiplies rows by rows.
            matrix = (rows.dims[1], other.dims[1])
        padding = math.prod(
            -(-dim.size // tile_columns) * tile_columns / dim.size for dim in matrix
        )
        num_shared = sizes.dims[0].size - 1
        return padding * (1 + num_shared * tile_rows / (used_fraction * num_rows))

    def _padding(self, dims: Sequence[int]) -> float:
        """Return padded over useful FLOPs of an operation with these dims.

        TPUs: a dim that is not a multiple of a matrix unit leaves a part of it idle.
        GPUs: a product that contracts `half_depth` elements, the last of `dims`,
        reaches half of the rate of long ones.
        """
        chip = chip_of(self.program.mesh.devices.flat[0].device_kind)
        unit = chip and chip.matrix_unit
        if chip and not unit and len(dims) > 1:
            return 1 + chip.achievable.half_depth / dims[-1]
        return math.prod(-(-dim // (unit or 1)) * (unit or 1) / dim for dim in dims)


def _layer_loops(operations: list[Operation]) -> Iterator[Operation]:
    for op in operations:
        if op.body and op.position.in_layers:
            yield op
        else:  # perhaps the loop over a pipeline's stages
            yield from _layer_loops(op.body)


def local_step(program: ConfiguredProgram) -> LocalStep:
    """Trace a program, without lowering, and return its local step."""
    mesh = program.mesh
    model = program.config.model
    microbatches = program.config.train.accumulation_steps
    gradients = Walk(mesh.shape, mesh.devices.flat[0].platform, microbatches, model)
    batch = _local_arrays(program.batch, gradients)
    for field in batch:
        rows, *other_dims = field.dims
        rows = rows._replace(size=rows.size // microbatches)
        field.dims = (rows, *other_dims)
        field.from_batch = True
    params = _local_arrays(program.state.params, gradients)
    gradients.run(trace_gradients(program), [*params, *batch])
    leaves, tree = jax.tree.flatten((program.state.params, program.state.optimizer))
    update = _walk_update(program.optimizer, tuple(leaves), tree)
    exchanges = [*gradients.recorder.exchanges, *update.recorder.exchanges]
    return LocalStep(program, gradients.operations + update.operations, exchanges)


@functools.lru_cache(maxsize=16)
def _walk_update(optimizer: Optimizer, leaves: tuple, tree: Any) -> Walk:
    """Walk an update. It is cached, because it does not depend on the remat policy."""
    mesh = leaves[0].sharding.mesh
    params, state = jax.tree.unflatten(tree, leaves)
    update = Walk(mesh.shape, mesh.devices.flat[0].platform)
    arguments = _local_arrays((params, state, params), update)
    update.run(trace_update(optimizer, params, state), arguments)
    return update


def _local_arrays(tree: Any, walk: Walk) -> list[LocalArray]:
    arrays = list[LocalArray]()
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        axes = walk.recorder.axes_by_dim(leaf.sharding.spec, leaf.ndim)
        arrays.append(LocalArray(tuple(map(Dim, shape, axes)), leaf.dtype.itemsize))
    return arrays
