"""The loss in tiles of tokens: all logits of C positions of each row at once.

Each device multiplies its local rows x[B_(data, fsdp), C, D] by the gathered weight of
the head W[D, V_tensor], tile by tile, and sums the float32 gradient dW[D, V_tensor]
over all tiles. The softmax over V_tensor costs all-reduces over tensor of the maxima,
the sums and the targets' logits, [B, C] each, and of dx[B, C, D].

Shapes: B batch, T time, C positions of a tile, D embed, V vocab.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from model.axes import mesh_axes
from model.gather import WeightPlacement
from model.head import project
from model.placement import ONE_DEVICE
from model.row_max import row_max
from train.core.loss.form import LossOptions
from train.core.loss.token_loss import Tokens

_NO_ID = 2**31 - 1


def sum_tiles(
    options: LossOptions,
    x_BTD: Float[Array, "B T D"],
    weight: Float[Array, "in out"],
    targets_BT: Int[Array, "B T"],
    gradients: bool,
):
    """Return (sums, (dx, dweight)), or (sums, None) without `gradients`.

    The sums are the loss and the nats, or what `row_sums` returns if `options.by_row`.
    dweight has the shape of the gathered `weight`, in float32.
    """
    placement = options.execution.placement
    if not placement.automatic_axes:
        return _scan(options, x_BTD, weight, targets_BT, (), gradients)
    weight_spec = placement.param_spec(options.axes)
    row_spec = placement.spec("batch")
    return placement.map_shards(
        partial(_scan_sharded_head, options, gradients=gradients),
        in_specs=(row_spec, weight_spec, row_spec),
        out_specs=(
            row_spec if options.by_row else PartitionSpec(),
            (row_spec, weight_spec) if gradients else None,
        ),
    )(x_BTD, weight, targets_BT)


def _scan_sharded_head(
    options: LossOptions, x_BTD, weight_shard, targets_BT, gradients: bool
):
    """Run `_scan` with the vocabulary sharded over axes that replicate the rows."""
    spec = options.execution.placement.param_spec(options.axes)
    dim_axes = [mesh_axes(entry) for entry in spec]
    vocab_dim = 0 if options.config.tied_head else 1
    vocab_axes, dim_axes[vocab_dim] = dim_axes[vocab_dim], ()
    placement = WeightPlacement(
        tuple((dim, axes) for dim, axes in enumerate(dim_axes) if axes)
    )
    weight = placement.gather(weight_shard)
    sums, grads = _scan(options, x_BTD, weight, targets_BT, vocab_axes, gradients)
    if grads is None:
        return sums, None
    dx_BTD, dweight = grads
    num_replicas = jax.lax.psum(1, tuple(a for axes in dim_axes for a in axes))
    return sums, (dx_BTD, placement.reduce_scatter(dweight) / num_replicas)


def _scan(options: LossOptions, x_BTD, weight, targets_BT, vocab_axes, gradients: bool):
    C = options.form.positions

    def split_tiles(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T/C, B, C, ...]
        shape = x.shape[0], x.shape[1] // C, C, *x.shape[2:]
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def add_tile(total, inputs):
        x, targets = inputs
        sums, dx_BCD = _tile(options, x, weight, targets, vocab_axes, gradients)
        return jax.tree.map(jnp.add, total, sums), dx_BCD

    zero = jnp.zeros(x_BTD.shape[:1] if options.by_row else (), jnp.float32)
    dweight = jnp.zeros(weight.shape, jnp.float32) if gradients else None
    zeros = (zero, zero), dweight
    (sums, dweight), dx = jax.lax.scan(
        add_tile, zeros, (split_tiles(x_BTD), split_tiles(targets_BT))
    )
    if dx is None:
        return sums, None
    return sums, (jnp.moveaxis(dx, 0, 1).reshape(x_BTD.shape), dweight)


def _tile(
    options: LossOptions,
    x_BCD: Float[Array, "B C D"],
    weight: Float[Array, "in out"],
    targets_BC: Int[Array, "B C"],
    vocab_axes: tuple[str, ...],
    gradients: bool,
):
    """Return ((sums, dweight), dx) of one tile. Gradients may be None."""
    config = options.config
    platform = options.execution.placement.platform
    execution = options.execution._replace(placement=ONE_DEVICE)
    logits_BCV, transpose = jax.vjp(
        lambda x, weight: project(x, weight, config, execution),
        x_BCD,
        weight.astype(jnp.float32),  # The gradient is then float32, too.
    )
    V = logits_BCV.shape[-1]
    first_id = V * jax.lax.axis_index(vocab_axes) if vocab_axes else 0
    ids_11V = (jnp.arange(V) + first_id)[None, None]
    if options.num_tokens != config.vocab_rows:  # larger ids only pad
        logits_BCV = jnp.where(ids_11V < options.num_tokens, logits_BCV, -jnp.inf)
    # Unlike a gather, a masked sum moves no logits between devices.
    is_target_BCV = ids_11V == targets_BC[..., None]
    if platform == "gpu":
        max_BC, Z_BC, target_logit_BC = _reduce_once(logits_BCV, is_target_BCV)
        if vocab_axes:
            local_max_BC, max_BC = max_BC, jax.lax.pmax(max_BC, vocab_axes)
            Z_BC *= jnp.exp(local_max_BC - max_BC)
    else:
        on_cpu = platform == "cpu"
        max_BC = row_max(logits_BCV)[..., 0] if on_cpu else logits_BCV.max(axis=-1)
        max_BC = jax.lax.pmax(max_BC, vocab_axes) if vocab_axes else max_BC
        Z_BC = jnp.sum(jnp.exp(logits_BCV - max_BC[..., None]), axis=-1)
        target_logit_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
    log_z_BC = max_BC + jnp.log(jax.lax.psum(Z_BC, vocab_axes))
    target_logit_BC = jax.lax.psum(target_logit_BC, vocab_axes)
    has_target_BC = targets_BC >= 0
    if options.by_row:
        best_id_BCV = jnp.where(logits_BCV == max_BC[..., None], ids_11V, _NO_ID)
        best_id_BC = jnp.min(best_id_BCV, axis=-1)
        if vocab_axes:
            best_id_BC = jax.lax.pmin(best_id_BC, vocab_axes)
        nats_BC = jnp.where(has_target_BC, log_z_BC - target_logit_BC, 0.0)
        missed_BC = jnp.where(has_target_BC & (best_id_BC != targets_BC), 1.0, 0.0)
        return ((nats_BC.sum(axis=-1), missed_BC.sum(axis=-1)), None), None
    mean_logit_BC = shares_11V = None
    if options.token_loss.uses_mean_logit:
        shares_11V = options.shares(ids_11V < options.num_tokens)
        # A product with the padding's logits, -inf, would not be a number.
        parts_BCV = jnp.where(shares_11V > 0, logits_BCV, 0.0) * shares_11V
        mean_logit_BC = jax.lax.psum(jnp.sum(parts_BCV, axis=-1), vocab_axes)
    tokens = Tokens(log_z_BC, target_logit_BC, has_target_BC, mean_logit_BC)
    sums = options.sum(tokens)
    if not gradients:
        return (sums, None), None
    probabilities_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
    factors = options.token_loss.factors(tokens)
    dlogits_BCV = factors.gradient(probabilities_BCV, is_target_BCV, shares_11V)
    dlogits_BCV = jnp.where(has_target_BC[..., None], dlogits_BCV, 0.0)
    dx_BCD, dweight = transpose(dlogits_BCV)
    return (sums, dweight), jax.lax.psum(dx_BCD, vocab_axes)


def _reduce_once(
    logits_BCV: Float[Array, "B C V"], is_target_BCV: Bool[Array, "B C V"]
) -> tuple[Float[Array, "B C"], Float[Array, "B C"], Float[Array, "B C"]]:
    """Return the maximum m, the sum of exp(logit - m), and the target's logit.

    One reduction reads the logits once. XLA:GPU reads them again for each of the three
    values if they are reduced separately.
    """

    def combine(values_1, values_2):
        max_1, sum_1, target_1 = values_1
        max_2, sum_2, target_2 = values_2
        max_ = jnp.maximum(max_1, max_2)
        finite_max = jnp.where(max_ == -jnp.inf, 0.0, max_)  # -inf: only padding
        sum_1 *= jnp.exp(max_1 - finite_max)
        sum_2 *= jnp.exp(max_2 - finite_max)
        return max_, sum_1 + sum_2, target_1 + target_2

    zero = jnp.zeros((), logits_BCV.dtype)
    target_logits = jnp.where(is_target_BCV, logits_BCV, zero)
    return jax.lax.reduce(
        (logits_BCV, jnp.ones_like(logits_BCV), target_logits),
        (zero - jnp.inf, zero, zero),
        combine,
        dimensions=(logits_BCV.ndim - 1,),
    )
