"""Next-token cross-entropy in float32, logits existing a tile at a time when large.

Shapes: B batch, T time, C positions of a tile, D embed, V vocab.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from data.batches import Batch
from model.axes import mesh_axes
from model.config import ModelConfig
from model.gpt import GPT, project
from model.layers import Execution

_LARGE_VOCAB = 8192  # from here on logits are tiled unless the config says otherwise
_TILE = 128


def loss_sum(
    model: GPT,
    batch: Batch,
    how: Execution,
    z_loss: float,
    chunk: int | None,
    head: PartitionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Sum the loss over a batch's targets; those that are negative do not count.

    Args:
        model: with its parameters bound.
        batch: int32 [B, T] fields.
        how: execution.
        z_loss: weight of log²Z, which keeps logits from drifting (PaLM, section 5).
        chunk: positions C of a row whose logits exist at once; None: all of a row's
            with a small vocabulary, else about 128.
        head: where `model.head_weight` lies.

    Returns:
        float32 scalars: what to minimize, and the cross-entropy in nats alone, which
        has no gradient.
    """
    x_BTD, _ = model.features(batch.inputs, batch.positions, batch.segment_ids, how)
    T = x_BTD.shape[1]
    C = tile(T, model.config.vocab_size or 0, chunk)
    if C == T:
        loss, nats = _sums(
            x_BTD, model.head_weight, batch.targets, model.config, how, z_loss
        )
        return loss, jax.lax.stop_gradient(nats)
    tiled = _Tiled(C, model.config, how, z_loss, head)
    with jax.named_scope("loss"):
        return _tiled_sums(tiled, x_BTD, model.head_weight, batch.targets)


def tile(T: int, V: int, chunk: int | None) -> int:
    """Settle C: a divisor of T, at most `chunk`."""
    most = chunk or (_TILE if V >= _LARGE_VOCAB else T)
    return next(c for c in range(min(most, T), 0, -1) if T % c == 0)


class _Tiled(NamedTuple):
    """A loss in tiles of C positions of a row."""

    C: int
    config: ModelConfig
    how: Execution
    z_loss: float
    head: PartitionSpec

    def __call__(self, x_BTD, weight, targets_BT, gradients: bool):
        """Sum over all devices: (loss, nats), and the loss' (dx, dweight) or None.

        Each device gathers the weight once, rounded, and adds up its own part of the
        gradient over all tiles in float32, before devices reduce it.
        """
        rules = self.how.rules
        if not rules.pairs:
            return self._local(x_BTD, weight, targets_BT, gradients)
        rows = rules.spec("batch")
        axes = frozenset(mesh_axes(rows[0]))
        spec = _only(self.head, axes)
        return jax.shard_map(
            partial(self._sharded, axes=axes, spec=spec, gradients=gradients),
            in_specs=(rows, spec, rows),
            out_specs=(PartitionSpec(), (rows, spec) if gradients else None),
            axis_names=axes,
            check_vma=False,
        )(x_BTD, weight, targets_BT)

    def _sharded(self, x_BTD, weight, targets_BT, axes, spec, gradients: bool):
        others = {axis for on in self.head for axis in mesh_axes(on)} - axes
        local = self._replace(
            how=self.how._replace(rules=self.how.rules.without(axes)),
            head=_only(self.head, frozenset(others)),
        )
        dtype = weight.dtype
        weight = weight.astype(self.how.compute_dtype)
        for dim, on in enumerate(spec):
            if on:
                weight = jax.lax.all_gather(weight, on, axis=dim, tiled=True)
        sums, grads = local._local(x_BTD, local._pin(weight), targets_BT, gradients)
        sums = jax.lax.psum(sums, tuple(axes))
        if grads is None:
            return sums, None
        dx, dweight = grads
        rest = axes - {axis for on in spec for axis in mesh_axes(on)}
        for dim, on in enumerate(spec):
            if on:
                dweight = jax.lax.psum_scatter(
                    dweight, on, scatter_dimension=dim, tiled=True
                )
        if rest:
            dweight = jax.lax.psum(dweight, tuple(rest))
        return sums, (dx, dweight.astype(dtype))

    def _local(self, x_BTD, weight, targets_BT, gradients: bool):
        def tiles(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T/C, B, C, ...]
            shape = x.shape[0], x.shape[1] // self.C, self.C, *x.shape[2:]
            return jnp.moveaxis(x.reshape(shape), 1, 0)

        def add(total, tile):
            x_BCD, targets_BC = tile

            def sums(x_BCD, weight):
                return _sums(
                    x_BCD, weight, targets_BC, self.config, self.how, self.z_loss
                )

            weight32 = weight.astype(jnp.float32)  # so that its gradient is, too
            if not gradients:
                return jax.tree.map(jnp.add, total, sums(x_BCD, weight32)), None
            with_gradients = jax.value_and_grad(sums, (0, 1), has_aux=True)
            part, (dx_BCD, dweight) = with_gradients(x_BCD, weight32)
            part, dweight = jax.tree.map(jnp.add, total, (part, dweight))
            return (part, self._pin(dweight)), dx_BCD

        zero = jnp.zeros((), jnp.float32)
        start, xs = (zero, zero), (tiles(x_BTD), tiles(targets_BT))
        if not gradients:
            return jax.lax.scan(add, start, xs)[0], None
        start = start, self._pin(jnp.zeros(weight.shape, jnp.float32))
        (sums, dweight), dx = jax.lax.scan(add, start, xs)
        assert dx is not None
        return sums, (jnp.moveaxis(dx, 0, 1).reshape(x_BTD.shape), dweight)

    def _pin(self, weight: jax.Array) -> jax.Array:
        """Keep a weight, or its gradient, where it lies."""
        if not self.how.rules.pairs:
            return weight
        return jax.lax.with_sharding_constraint(weight, self.head)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_sums(tiled: _Tiled, x_BTD, weight, targets_BT):
    return tiled(x_BTD, weight, targets_BT, gradients=False)[0]


def _tiled_forward(tiled: _Tiled, x_BTD, weight, targets_BT):
    # The loss is a sum, so its gradient is known here but for one factor: no tile's
    # logits are made twice.
    return tiled(x_BTD, weight, targets_BT, gradients=True)


def _tiled_backward(tiled: _Tiled, gradients, cotangents):
    factor, _ = cotangents
    dx, dweight = jax.tree.map(lambda x: (factor * x).astype(x.dtype), gradients)
    return dx, dweight, None


_tiled_sums.defvjp(_tiled_forward, _tiled_backward)


def _only(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """Keep some mesh axes of a spec."""
    kept = [tuple(axis for axis in mesh_axes(on) if axis in axes) for on in spec]
    return PartitionSpec(*(on or None for on in kept))


def _sums(
    x_BCD: jax.Array,
    weight: jax.Array,
    targets_BC: jax.Array,
    config: ModelConfig,
    how: Execution,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    logits_BCV = project(x_BCD, weight, config, how)
    log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    # A masked sum instead of a gather: with the vocabulary sharded each device adds up
    # its part, and no logits travel.
    V = logits_BCV.shape[-1]
    is_target_BCV = jnp.arange(V) == targets_BC[..., None]
    target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
    counts = targets_BC >= 0
    nats = jnp.sum(jnp.where(counts, log_z_BC - target_BC, 0.0))
    z = jnp.sum(jnp.where(counts, jnp.square(log_z_BC), 0.0))
    return nats + z_loss * z, nats
