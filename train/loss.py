"""Next-token cross-entropy in float32. Large logits are computed tile by tile.

Shapes: B batch, T time, C positions of a tile, D embed, V vocab.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from data.batches import Batch
from model.axes import mesh_axes
from model.config import ModelConfig
from model.execution import NO_CONTEXT, CallContext, Execution
from model.experts.router import Routing
from model.gather import WeightPlacement
from model.gpt import GPT, project
from model.placement import ONE_DEVICE
from model.row_max import row_max
from model.scopes import part_scope

_LARGE_VOCAB = 8192  # Logits of this many ids or more are tiled.
_TILE = 128
_NO_ID = 2**31 - 1


def loss_sum(
    model: GPT,
    batch: Batch,
    execution: Execution,
    z_loss: float,
    chunk: int | None,
    num_tokens: int | None = None,
    call: CallContext = NO_CONTEXT,
) -> tuple[Float[Array, ""], Float[Array, ""], Routing | None]:
    """Sum the loss over a batch's targets; negative targets are ignored.

    Args:
        model: the model with bound parameters.
        batch: int32 [B, T] fields.
        execution: how the program runs the model.
        z_loss: weight of log²Z, which keeps logits from drifting (PaLM, section 5).
        chunk: the largest number of positions of a row whose logits exist at once.
            None: all positions for a small vocabulary, otherwise at most 128.
        num_tokens: the number of ids that the tokenizer has. Larger ids only pad the
            vocabulary and have no probability. None: the whole vocabulary.
        call: the random keys and taps of this call.

    Returns:
        The loss to minimize and the cross-entropy in nats, which has no gradient, as
        float32 scalars; and the routing, whose auxiliary loss is not included.
    """
    x_BTD, _, routing = model.features(
        batch.inputs, batch.positions, batch.segment_ids, execution, call=call
    )
    tiled = _make_tiled_loss(model, x_BTD, execution, chunk, num_tokens)
    tiled = tiled._replace(z_loss=z_loss)
    with jax.named_scope("loss"), part_scope("head"):
        sums: tuple[jax.Array, jax.Array] = _sums(
            tiled, x_BTD, model.head_weight, batch.targets
        )
        return *sums, routing


def row_sums(
    model: GPT,
    batch: Batch,
    execution: Execution,
    num_tokens: int | None,
    chunk: int | None,
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Sum the cross-entropy of each row's targets, and count the missed targets.

    A target is missed unless it is the most likely token (in a tie, the token with the
    lowest id). The arguments are those of `loss_sum`.
    """
    x_BTD, _, _ = model.features(
        batch.inputs, batch.positions, batch.segment_ids, execution
    )
    tiled = _make_tiled_loss(model, x_BTD, execution, chunk, num_tokens)
    tiled = tiled._replace(by_row=True)
    with jax.named_scope("loss"), part_scope("head"):
        sums, _ = tiled(x_BTD, model.head_weight, batch.targets, gradients=False)
        return sums


def _make_tiled_loss(
    model: GPT,
    x_BTD: Float[Array, "B T D"],
    execution: Execution,
    chunk: int | None,
    num_tokens: int | None,
) -> "_TiledLoss":
    """Return the tiled loss for features of this shape."""
    vocab_size = model.config.vocab_size or 0
    return _TiledLoss(
        tile_size(x_BTD.shape[1], vocab_size, chunk),
        model.config,
        execution=execution,
        axes=model.head_axes,
        num_tokens=num_tokens or vocab_size,
    )


def tile_size(T: int, V: int, chunk: int | None) -> int:
    """Return C, the number of positions of a tile: a divisor of T, at most `chunk`."""
    limit = chunk or (_TILE if V >= _LARGE_VOCAB else T)
    return next(c for c in range(min(limit, T), 0, -1) if T % c == 0)


class _TiledLoss(NamedTuple):
    """The loss in tiles of C positions of a row, with a manual gradient.

    The head's weight W[D_fsdp, V_tensor], rounded to the compute dtype, is gathered
    over fsdp once for all tiles: each device holds W[D, V_tensor]. Each device
    multiplies its local rows x[B_(data, fsdp), C, D] tile by tile, and sums the float32
    gradient dW[D, V_tensor] of its rows over all tiles. The sum is reduce-scattered
    over fsdp back to dW[D_fsdp, V_tensor]. The softmax over V_tensor costs all-reduces
    over tensor of the maxima, the sums and the targets' logits, [B, C] each, and of
    dx[B, C, D].

    V is `vocab_rows`; entries from `num_tokens` on get the logit -inf. With
    `by_row` the sums are those of `row_sums`, [B] each: the nats and the misses.
    """

    C: int
    config: ModelConfig
    execution: Execution
    axes: tuple[str, ...]
    num_tokens: int
    z_loss: float = 0.0
    by_row: bool = False

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        local_weight: Float[Array, "in out"],
        targets_BT: Int[Array, "B T"],
        gradients: bool,
    ):
        """Return (sums, (dx, dweight)), or (sums, None) without `gradients`."""
        numerics, placement = self.execution.numerics, self.execution.placement
        head_placement = self.execution.weight_placement(self.axes)
        # train/rows.py sums the gradient over replicas, once in a step.
        head_placement = head_placement._replace(replica_axes=())
        weight = head_placement.gather(local_weight.astype(numerics.compute_dtype))
        if placement.automatic_axes:
            weight_spec = placement.param_spec(self.axes)
            row_spec = placement.spec("batch")
            sums, grads = placement.map_shards(
                partial(self._scan_sharded_head, gradients=gradients),
                in_specs=(row_spec, weight_spec, row_spec),
                out_specs=(
                    row_spec if self.by_row else PartitionSpec(),
                    (row_spec, weight_spec) if gradients else None,
                ),
            )(x_BTD, weight, targets_BT)
        else:
            sums, grads = self._scan(x_BTD, weight, targets_BT, (), gradients)
        if grads is None:
            return sums, None
        dx_BTD, dweight = grads
        dlocal = head_placement.reduce_scatter(dweight).astype(local_weight.dtype)
        # Without this barrier, the float32 dweight lives until the backward pass ends.
        return sums, jax.lax.optimization_barrier((dx_BTD, dlocal))

    def _scan_sharded_head(self, x_BTD, weight_shard, targets_BT, gradients: bool):
        """Run `_scan` with the vocabulary sharded over axes that replicate the rows."""
        spec = self.execution.placement.param_spec(self.axes)
        dim_axes = [mesh_axes(entry) for entry in spec]
        vocab_dim = 0 if self.config.tied_head else 1
        vocab_axes, dim_axes[vocab_dim] = dim_axes[vocab_dim], ()
        placement = WeightPlacement(
            tuple((dim, axes) for dim, axes in enumerate(dim_axes) if axes)
        )
        weight = placement.gather(weight_shard)
        sums, grads = self._scan(x_BTD, weight, targets_BT, vocab_axes, gradients)
        if grads is None:
            return sums, None
        dx_BTD, dweight = grads
        num_replicas = jax.lax.psum(1, tuple(a for axes in dim_axes for a in axes))
        return sums, (dx_BTD, placement.reduce_scatter(dweight) / num_replicas)

    def _scan(self, x_BTD, weight, targets_BT, vocab_axes, gradients: bool):
        def split_tiles(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T/C, B, C, ...]
            shape = x.shape[0], x.shape[1] // self.C, self.C, *x.shape[2:]
            return jnp.moveaxis(x.reshape(shape), 1, 0)

        def add_tile(total, inputs):
            x, targets = inputs
            sums, dx_BCD = self._tile(x, weight, targets, vocab_axes, gradients)
            return jax.tree.map(jnp.add, total, sums), dx_BCD

        zero = jnp.zeros(x_BTD.shape[:1] if self.by_row else (), jnp.float32)
        dweight = jnp.zeros(weight.shape, jnp.float32) if gradients else None
        zeros = (zero, zero), dweight
        (sums, dweight), dx = jax.lax.scan(
            add_tile, zeros, (split_tiles(x_BTD), split_tiles(targets_BT))
        )
        if dx is None:
            return sums, None
        return sums, (jnp.moveaxis(dx, 0, 1).reshape(x_BTD.shape), dweight)

    def _tile(
        self,
        x_BCD: Float[Array, "B C D"],
        weight: Float[Array, "in out"],
        targets_BC: Int[Array, "B C"],
        vocab_axes: tuple[str, ...],
        gradients: bool,
    ):
        """Return ((sums, dweight), dx) of one tile. Gradients may be None."""
        on_cpu = self.execution.placement.platform == "cpu"
        execution = self.execution._replace(placement=ONE_DEVICE)
        logits_BCV, transpose = jax.vjp(
            lambda x, weight: project(x, weight, self.config, execution),
            x_BCD,
            weight.astype(jnp.float32),  # The gradient is then float32, too.
        )
        V = logits_BCV.shape[-1]
        first_id = V * jax.lax.axis_index(vocab_axes) if vocab_axes else 0
        ids_11V = (jnp.arange(V) + first_id)[None, None]
        if self.num_tokens != self.config.vocab_rows:  # larger ids only pad
            logits_BCV = jnp.where(ids_11V < self.num_tokens, logits_BCV, -jnp.inf)
        max_BC = row_max(logits_BCV)[..., 0] if on_cpu else logits_BCV.max(axis=-1)
        max_BC = jax.lax.pmax(max_BC, vocab_axes) if vocab_axes else max_BC
        Z_BC = jnp.sum(jnp.exp(logits_BCV - max_BC[..., None]), axis=-1)
        log_z_BC = max_BC + jnp.log(jax.lax.psum(Z_BC, vocab_axes))
        # Unlike a gather, a masked sum moves no logits between devices.
        is_target_BCV = ids_11V == targets_BC[..., None]
        target_logit_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
        target_logit_BC = jax.lax.psum(target_logit_BC, vocab_axes)
        has_target_BC = targets_BC >= 0
        if self.by_row:
            best_id_BCV = jnp.where(logits_BCV == max_BC[..., None], ids_11V, _NO_ID)
            best_id_BC = jnp.min(best_id_BCV, axis=-1)
            if vocab_axes:
                best_id_BC = jax.lax.pmin(best_id_BC, vocab_axes)
            nats_BC = jnp.where(has_target_BC, log_z_BC - target_logit_BC, 0.0)
            missed_BC = jnp.where(has_target_BC & (best_id_BC != targets_BC), 1.0, 0.0)
            return ((nats_BC.sum(axis=-1), missed_BC.sum(axis=-1)), None), None
        nats = jnp.sum(jnp.where(has_target_BC, log_z_BC - target_logit_BC, 0.0))
        squares = jnp.sum(jnp.where(has_target_BC, jnp.square(log_z_BC), 0.0))
        sums = nats + self.z_loss * squares, nats
        if not gradients:
            return (sums, None), None
        probabilities_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
        factor_BC1 = (1 + 2 * self.z_loss * log_z_BC)[..., None]
        dlogits_BCV = factor_BC1 * probabilities_BCV - is_target_BCV
        dlogits_BCV = jnp.where(has_target_BC[..., None], dlogits_BCV, 0.0)
        dx_BCD, dweight = transpose(dlogits_BCV)
        return (sums, dweight), jax.lax.psum(dx_BCD, vocab_axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(tiled: _TiledLoss, x_BTD, weight, targets_BT):
    return tiled(x_BTD, weight, targets_BT, gradients=False)[0]


def _forward(tiled: _TiledLoss, x_BTD, weight, targets_BT):
    # Compute the gradients here, so that logits are computed only once. The loss is a
    # sum, so the backward pass only multiplies them by the cotangent.
    return tiled(x_BTD, weight, targets_BT, gradients=True)


def _backward(tiled: _TiledLoss, gradients, cotangents):
    factor, _ = cotangents
    dx, dweight = jax.tree.map(lambda x: (factor * x).astype(x.dtype), gradients)
    return dx, dweight, None


_sums.defvjp(_forward, _backward)
