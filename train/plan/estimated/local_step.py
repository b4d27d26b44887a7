"""Walk the gradients and the update of one device's step."""

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from model.axes import mesh_axes
from model.choices import ExpertExchange
from model.params import named
from train.hardware.chips import Chip, chip_of
from train.optimizer.update import Optimizer
from train.plan.cost import Flops
from train.plan.estimated.arrays import Dim, LocalArray
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.operation import Operation, flatten_loops
from train.plan.estimated.trace import trace_gradients, trace_update
from train.plan.estimated.walk import Walk
from train.program import Program

FLOAT32 = 4  # bytes
# Products of attention's backward pass: Splash has two kernels, and each recomputes the
# scores and their cotangent; cuDNN recomputes the scores and computes four gradients.
_SPLASH_BACKWARD, _CUDNN_BACKWARD = 7, 5


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step.

    gradients: the walk over the gradients of all microbatches.
    update: the walk over the update, after all microbatches.
    params: the local part of each parameter.
    batch: the local part of each field of a microbatch.
    exchanges: the collectives of the whole step.
    """

    program: Program
    gradients: Walk
    update: Walk
    params: list[LocalArray]
    batch: list[LocalArray]
    exchanges: list[Exchange]

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.program.config.train.accumulation_steps

    @property
    def operations(self) -> list[Operation]:
        """All operations, including those in the bodies of loops."""
        return [
            *flatten_loops(self.gradients.operations),
            *flatten_loops(self.update.operations),
        ]

    @property
    def loops(self) -> list[Operation]:
        """The loops of the gradients; inner loops stand for a loop over stages."""
        loops = [op for op in self.gradients.operations if op.body]
        loop_lists = [op.body if op.position.in_stages else [op] for op in loops]
        return [op for ops in loop_lists for op in ops if op.body]

    @property
    def layers(self) -> list[Operation]:
        """The loops over the layers, forward and backward."""
        return [loop for loop in self.loops if loop.position.in_layers]

    @functools.cached_property
    def flops(self) -> defaultdict[str, Flops]:
        """The FLOPs of matrix products and attention kernels, by section."""
        chip = chip_of(self.program.mesh.devices.flat[0].device_kind)
        by_section = defaultdict[str, Flops](Flops)
        for op in self.operations:
            if op.is_kernel:
                by_section[op.position.section] += self._attention_flops(op, chip)
            elif op.product:
                by_section[op.position.section] += self._product_flops(op, chip)
        return by_section

    def _product_flops(self, op: Operation, chip: Chip | None) -> Flops:
        assert op.product
        flops = op.position.count * op.flops
        is_grouped = op.name == "ragged_dot_general"
        if is_grouped:
            flops *= self._used_fraction(op)
        has_eight_bits = all(array.itemsize == 1 for array in op.operands[:2])
        return Flops(
            flops,
            eight_bits=flops if has_eight_bits else 0.0,
            grouped=flops if is_grouped else 0.0,
            padded=flops * _padding(op, chip),
        )

    def _attention_flops(self, op: Operation, chip: Chip | None) -> Flops:
        flops, computed = op.position.count * op.flops, op.computed
        if self.program.execution.attention.is_cudnn:  # the traced kernel is Splash's
            is_backward = op.position.is_backward
            flops *= _CUDNN_BACKWARD / _SPLASH_BACKWARD if is_backward else 1.0
            # cuDNN computes half of a causal square, for any size of blocks.
            computed = computed if computed == 1 else min(computed, 0.5)
        unit, head_dim = chip and chip.matrix_unit, self.program.config.model.head_size
        padding = _fill_up(head_dim, unit) if unit else 1.0
        return Flops(
            attention=flops * computed,
            whole_attention=flops,
            padded=flops * computed * padding,
        )

    def _used_fraction(self, grouped: Operation) -> float:
        """Return the fraction of rows that a grouped product uses if loads are equal.

        Rows that are sent fill a part of a device's capacity. Gathered rows include the
        choices of other devices' experts (model/experts/exchange.py).
        """
        model, execution = self.program.config.model, self.program.execution
        rows, _, sizes = grouped.operands
        num_local, k = sizes.dims[0].size, model.experts_per_token
        is_sent = execution.expert_exchange is ExpertExchange.ragged
        if is_sent and num_local < model.num_experts:
            tokens = math.prod(dim.size for dim in self.batch[0].dims)
            return tokens * k / rows.dims[0].size
        return k * num_local / (model.num_experts * min(k, num_local))


def _padding(op: Operation, chip: Chip | None) -> float:
    """Return the FLOPs of a product, relative to those with which its time agrees.

    TPUs: a dim that is not a multiple of a matrix unit leaves a part of it idle. GPUs:
    a contraction of `half_depth` elements reaches half of the rate of long ones.
    """
    if chip is None or op.product is None:
        return 1.0
    rows, columns, depth, _ = op.product
    if chip.matrix_unit is None:
        return 1 + chip.achievable.half_depth / depth
    return math.prod(_fill_up(n, chip.matrix_unit) for n in (rows, columns, depth))


def _fill_up(size: int, unit: int) -> float:
    return math.ceil(size / unit) * unit / size


def local_step(program: Program) -> LocalStep:
    """Trace a program, without lowering, and return its local step."""
    mesh, model = program.mesh, program.config.model
    microbatches = program.config.train.accumulation_steps
    params, batch = _local_arrays(program.state.params), _local_arrays(program.batch)
    for field in batch:
        rows, *other_dims = field.dims
        field.dims = (rows._replace(size=rows.size // microbatches), *other_dims)
        field.from_batch = True
    platform = mesh.devices.flat[0].platform
    gradients = Walk(mesh.shape, platform, model, microbatches)
    loss, *results = gradients.run(trace_gradients(program), [*params, *batch])
    gradients.recorder.reduce(loss, ())
    # The results after the gradients are the experts' loads, which are replicated.
    for result, param in zip(results, params, strict=False):
        gradients.recorder.reduce(result, param.axes, param.label)
    leaves, tree = jax.tree.flatten((program.state.params, program.state.optimizer))
    update = _walk_update(program.optimizer, tuple(leaves), tree)
    exchanges = [*gradients.recorder.exchanges, *update.recorder.exchanges]
    return LocalStep(program, gradients, update, params, batch, exchanges)


@functools.lru_cache(maxsize=16)
def _walk_update(optimizer: Optimizer, leaves: tuple, tree: Any) -> Walk:
    """Walk an update. It is cached, because it does not depend on the remat policy."""
    mesh = leaves[0].sharding.mesh
    params, state = jax.tree.unflatten(tree, leaves)
    update = Walk(mesh.shape, mesh.devices.flat[0].platform, None, 1)
    local_params, jaxpr = _local_arrays(params), trace_update(optimizer, params, state)
    arguments = [*_local_arrays(params), *_local_arrays(state), *local_params]
    results = update.run(jaxpr, arguments)
    for result, param in zip(results[: len(local_params)], local_params, strict=True):
        entries = [dim.axes for dim in param.dims]
        update.recorder.reshard(result, entries, update.position, strict=True)
    return update


def _local_arrays(tree: Any) -> list[LocalArray]:
    """Return the local arrays of a tree, with their names as labels."""
    arrays = list[LocalArray]()
    for label, leaf in named(tree):
        assert isinstance(leaf.sharding, NamedSharding)
        spec, sizes = leaf.sharding.spec, leaf.sharding.mesh.shape
        shape = leaf.sharding.shard_shape(leaf.shape)
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        dims = tuple(
            Dim(size, tuple(a for a in mesh_axes(entry) if sizes[a] > 1))
            for size, entry in zip(shape, entries, strict=True)
        )
        arrays.append(LocalArray(dims, leaf.dtype.itemsize, label=label))
    return arrays
