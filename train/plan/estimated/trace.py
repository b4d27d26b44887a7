"""The real program as jaxprs: the gradients of a microbatch, and the update.

Shapes differ between the layouts of a search, the equations do not: gradients are
traced once for each policy of recomputation, on a mesh as small as one can be, and
plan/estimated/walk.py puts in the sizes that devices see. Nothing is lowered.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from data.batches import Batch
from model.config import Attention, ModelConfig
from model.gpt import abstract_gpt, params_of
from model.layers import Execution
from train.config import TrainConfig
from train.mesh_sizes import num_shards
from train.optimizer import Optimizer
from train.program import Program
from train.step import make_gradients

_KERNEL_TILE = 128  # the kernel that is traced works on as many positions
_ROWS = 2  # of a device


class _Key(NamedTuple):
    """All that the equations of the gradients depend on."""

    model: ModelConfig
    how: Execution
    loss: tuple[float, int | None]
    head: PartitionSpec
    length: int
    documents: bool
    mesh: tuple[tuple[str, int], ...]


def trace_gradients(program: Program) -> ClosedJaxpr:
    """Trace (parameters, batch) -> (loss, gradients) of one microbatch."""
    config, how = program.config, program.how
    if how.attention is Attention.cudnn:
        # cuDNN's kernel cannot be traced without cuDNN. Splash reads, writes and keeps
        # the same arrays.
        how = how._replace(attention=Attention.splash)
    tile = _KERNEL_TILE if how.attention is Attention.splash else 1
    return _gradients(
        _Key(
            model=config.model,
            how=how,
            loss=(config.train.z_loss, config.train.loss_chunk_tokens),
            head=program.head,
            length=-(-config.data.sequence_length // tile) * tile,
            documents=program.batch.segment_ids is not None,
            mesh=tuple((a, _least(n)) for a, n in program.mesh.shape.items()),
        )
    )


@functools.lru_cache(maxsize=64)
def _gradients(key: _Key) -> ClosedJaxpr:
    z_loss, chunk = key.loss
    train = TrainConfig(accumulation_steps=1, z_loss=z_loss, loss_chunk_tokens=chunk)
    model = abstract_gpt(key.model)
    shards = num_shards(dict(key.mesh), key.how.rules.spec("batch")[0])
    rows = jax.ShapeDtypeStruct((_ROWS * shards, key.length), jnp.int32)
    batch = Batch(rows, rows, rows if key.documents else None, rows)
    names, sizes = zip(*key.mesh, strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    step = make_gradients(model, key.how, train, key.head)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(step)(params_of(model), batch)


def trace_update(program: Program) -> ClosedJaxpr:
    """Trace (gradients, optimizer's state, parameters) -> (parameters, state)."""
    leaves, tree = jax.tree.flatten((program.state.params, program.state.optimizer))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _update(program.optimizer, shapes, tree)


@functools.lru_cache(maxsize=64)
def _update(optimizer: Optimizer, shapes: tuple, tree: Any) -> ClosedJaxpr:
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    params, state = jax.tree.unflatten(tree, leaves)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, jnp.float32(1), state, params, jnp.int32(0))

    return jax.make_jaxpr(update)(params, state, params)


def _least(size: int) -> int:
    """Give the least size of an axis that divides what `size` divides."""
    return next((n for n in range(2, size) if size % n == 0), size)
