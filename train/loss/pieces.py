"""The loss in pieces of the vocabulary: some of the logits of all tokens at once.

Two loops go over the pieces. The first loop computes the logits of a piece, and keeps
their exponentials relative to the piece's maximum, rounded to the compute dtype as
operands of products are. When the sums of all pieces are known, the second loop scales
the exponentials to probabilities and multiplies by them. The weight's gradient of a
piece is complete, and is reduce-scattered at once.

Shapes: B batch, T time, D embed, V vocab, P pieces, J ids of a piece.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.eight_bits.quantization import gradient_specs
from model.gpt import head_spec, project
from model.linear import einsum
from model.placement import ONE_DEVICE
from train.loss.form import LossOptions

_MASKED = -1e30  # The logit of an id that does not count in a piece; it is finite.


class _Piece(NamedTuple):
    """What the first loop keeps of a piece. Sums and maxima are over its ids.

    max, sum: the largest logit, and the sum of exp(logit - max), in float32.
    target_logit: the target's logit if the target is in the piece, otherwise zero.
    exps: exp(logit - max) in the compute dtype.
    """

    max_BT: Float[Array, "*P B T"]
    sum_BT: Float[Array, "*P B T"]
    target_logit_BT: Float[Array, "*P B T"]
    exps_BTJ: Float[Array, "*P B T J"]


def sum_pieces(
    options: LossOptions,
    x_BTD: Float[Array, "B T D"],
    local_weight: Float[Array, "in out"],
    targets_BT: Int[Array, "B T"],
):
    """Return (sums, (dx, dweight)): the loss and the nats, and their gradients.

    The float32 dweight has the shape of `local_weight`. No automatic axis has several
    devices.
    """
    config, J = options.config, options.form.ids
    assert J is not None
    vocab_dim, weight = 0 if config.tied_head else 1, options.gather(local_weight)
    V = weight.shape[vocab_dim]
    execution = options.execution._replace(placement=ONE_DEVICE)
    compute = execution.numerics.compute_dtype

    def piece_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first id of a piece, and the piece of the weight."""
        # The last piece overlaps the one before.
        first_id = jnp.minimum(number * J, V - J)
        return first_id, jax.lax.dynamic_slice_in_dim(weight, first_id, J, vocab_dim)

    def compute_piece(_, number: jax.Array) -> tuple[None, _Piece]:
        first_id, weight_piece = piece_of(number)
        ids_11J = (first_id + jnp.arange(J))[None, None]
        counts_11J = (ids_11J >= number * J) & (ids_11J < options.num_tokens)
        logits_BTJ = project(x_BTD, weight_piece, config, execution)
        logits_BTJ = jnp.where(counts_11J, logits_BTJ, _MASKED)
        max_BT = logits_BTJ.max(axis=-1)
        exps_BTJ = jnp.exp(logits_BTJ - max_BT[..., None])
        is_target_BTJ = (ids_11J == targets_BT[..., None]) & counts_11J
        return None, _Piece(
            max_BT,
            jnp.sum(exps_BTJ, axis=-1),
            jnp.sum(jnp.where(is_target_BTJ, logits_BTJ, 0.0), axis=-1),
            exps_BTJ.astype(compute),
        )

    numbers_P = jnp.arange(-(-V // J))
    _, pieces = jax.lax.scan(compute_piece, None, numbers_P)
    max_BT = pieces.max_BT.max(axis=0)
    Z_BT = jnp.sum(pieces.sum_BT * jnp.exp(pieces.max_BT - max_BT), axis=0)
    log_z_BT = max_BT + jnp.log(Z_BT)
    target_logit_BT = jnp.sum(pieces.target_logit_BT, axis=0)
    has_target_BT = targets_BT >= 0
    sums = options.sum(log_z_BT, target_logit_BT, has_target_BT)
    factor_BT = jnp.where(has_target_BT, 1 + 2 * options.z_loss * log_z_BT, 0.0)
    spec_dx, spec_dweight = gradient_specs(head_spec(config))

    def add_gradients(gradients, inputs: tuple[jax.Array, _Piece]):
        dx, dlocal = gradients
        number, piece = inputs
        first_id, weight_piece = piece_of(number)
        ids_11J = (first_id + jnp.arange(J))[None, None]
        is_target_BTJ = (ids_11J == targets_BT[..., None]) & (ids_11J >= number * J)
        scale_BT = factor_BT * jnp.exp(piece.max_BT - log_z_BT)
        exps_BTJ = piece.exps_BTJ.astype(jnp.float32)
        dlogits_BTJ = scale_BT[..., None] * exps_BTJ - is_target_BTJ
        if (cap := config.logit_soft_cap) is not None:
            # exp(logit - max) tells the logit, which is cap tanh(y) at y. If it is
            # zero, it does not matter, unless the logit is the target's.
            logits_BTJ = piece.max_BT[..., None] + jnp.log(exps_BTJ)
            logits_BTJ = jnp.where(
                is_target_BTJ, target_logit_BT[..., None], logits_BTJ
            )
            dlogits_BTJ *= 1 - jnp.square(jnp.clip(logits_BTJ / cap, -1, 1))
        dx += einsum(spec_dx, dlogits_BTJ, weight_piece, compute, jnp.float32)
        dpiece = einsum(spec_dweight, x_BTD, dlogits_BTJ, compute, jnp.float32)
        dpiece = options.head_placement.reduce_scatter(dpiece).astype(dlocal.dtype)
        old = jax.lax.dynamic_slice_in_dim(dlocal, first_id, J, vocab_dim)
        dlocal = jax.lax.dynamic_update_slice_in_dim(
            dlocal, old + dpiece, first_id, vocab_dim
        )
        return (dx, dlocal), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (x_BTD, local_weight))
    (dx, dlocal), _ = jax.lax.scan(add_gradients, tuple(zeros), (numbers_P, pieces))
    return sums, (dx.astype(x_BTD.dtype), dlocal)
