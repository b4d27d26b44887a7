"""The loss in pieces of the vocabulary: some of the logits of all tokens at once.

Two loops go over the pieces. The first loop computes the logits of a piece, and keeps
their exponentials relative to the piece's maximum, rounded to the compute dtype as
operands of products are. When the sums of all pieces are known, the second loop scales
the exponentials to probabilities and multiplies by them. The weight's gradient of a
piece is complete, and is reduce-scattered at once.

Shapes: B batch, T time, D embed, V vocab, P pieces, J ids of a piece.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.head import head_spec, project
from model.placement import ONE_DEVICE
from model.products import einsum, gradient_specs
from train.core.loss.form import LossOptions
from train.core.loss.token_loss import LogitFactors, Tokens

_MASKED = -1e30  # The logit of an id that does not count in a piece; it is finite.


class _Piece(NamedTuple):
    """What the first loop keeps of a piece. Sums and maxima are over its ids.

    max, sum: the largest logit, and the sum of exp(logit - max), in float32.
    target_logit: the target's logit if the target is in the piece, otherwise zero.
    exps: exp(logit - max) in the compute dtype.
    mean_logit: the piece's part of the mean logit. None if the loss does not use it.
    """

    max_BT: Float[Array, "*P B T"]
    sum_BT: Float[Array, "*P B T"]
    target_logit_BT: Float[Array, "*P B T"]
    exps_BTJ: Float[Array, "*P B T J"]
    mean_logit_BT: Float[Array, "*P B T"] | None = None


class _Slice(NamedTuple):
    """The part of the head that a piece multiplies, and what its ids are.

    counts: whether an id counts in this piece and has a probability.
    """

    first_id: Int[Array, ""]
    weight: Float[Array, "in out"]
    counts_11J: Bool[Array, "1 1 J"]
    is_target_BTJ: Bool[Array, "B T J"]


class _Head(NamedTuple):
    """The operands of all pieces. `weight` is gathered."""

    options: LossOptions
    x_BTD: Float[Array, "B T D"]
    weight: Float[Array, "in out"]
    targets_BT: Int[Array, "B T"]

    @property
    def vocab_dim(self) -> int:
        """The dim of the weight that pieces divide."""
        return 0 if self.options.config.tied_head else 1

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the operands of products."""
        return self.options.execution.numerics.compute_dtype

    def slice(self, number: jax.Array) -> _Slice:
        """Return the part of the head for a piece."""
        J = self.options.form.ids or 0
        V = self.weight.shape[self.vocab_dim]
        # The last piece overlaps the one before, whose ids count there.
        first_id = jnp.minimum(number * J, V - J)
        ids_11J = (first_id + jnp.arange(J))[None, None]
        counts_11J = (ids_11J >= number * J) & (ids_11J < self.options.num_tokens)
        return _Slice(
            first_id,
            jax.lax.dynamic_slice_in_dim(self.weight, first_id, J, self.vocab_dim),
            counts_11J,
            (ids_11J == self.targets_BT[..., None]) & counts_11J,
        )

    def compute_piece(self, number: jax.Array) -> _Piece:
        """Compute the logits of a piece, and return what is kept of them."""
        options = self.options
        part = self.slice(number)
        execution = options.execution._replace(placement=ONE_DEVICE)
        logits_BTJ = project(self.x_BTD, part.weight, options.config, execution)
        logits_BTJ = jnp.where(part.counts_11J, logits_BTJ, _MASKED)
        max_BT = logits_BTJ.max(axis=-1)
        exps_BTJ = jnp.exp(logits_BTJ - max_BT[..., None])
        mean_logit_BT = None
        if options.token_loss.uses_mean_logit:
            parts_BTJ = logits_BTJ * options.shares(part.counts_11J)
            mean_logit_BT = jnp.sum(parts_BTJ, axis=-1)
        return _Piece(
            max_BT,
            jnp.sum(exps_BTJ, axis=-1),
            jnp.sum(jnp.where(part.is_target_BTJ, logits_BTJ, 0.0), axis=-1),
            exps_BTJ.astype(self.compute_dtype),
            mean_logit_BT,
        )

    def differentiate(
        self, part: _Slice, piece: _Piece, tokens: Tokens, factors: LogitFactors
    ) -> jax.Array:
        """Return the float32 gradient of a piece's logits [B, T, J] before any cap."""
        scale_BT = factors.softmax * jnp.exp(piece.max_BT - tokens.log_z)
        exps_BTJ = piece.exps_BTJ.astype(jnp.float32)
        factors = factors._replace(softmax=scale_BT)
        shares_11J = None
        if factors.mean_logit is not None:
            shares_11J = self.options.shares(part.counts_11J)
        dlogits_BTJ = factors.gradient(exps_BTJ, part.is_target_BTJ, shares_11J)
        if (cap := self.options.config.logit_soft_cap) is None:
            return dlogits_BTJ
        # exp(logit - max) tells the logit, which is cap tanh(y) at y. If it is zero, it
        # does not matter, unless the logit is the target's.
        logits_BTJ = piece.max_BT[..., None] + jnp.log(exps_BTJ)
        target_logit_BT1 = tokens.target_logit[..., None]
        logits_BTJ = jnp.where(part.is_target_BTJ, target_logit_BT1, logits_BTJ)
        return dlogits_BTJ * (1 - jnp.square(jnp.clip(logits_BTJ / cap, -1, 1)))


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
    J = options.form.ids
    assert J is not None
    head = _Head(options, x_BTD, options.gather(local_weight), targets_BT)
    numbers_P = jnp.arange(-(-head.weight.shape[head.vocab_dim] // J))
    pieces = jax.lax.map(head.compute_piece, numbers_P)
    max_BT = pieces.max_BT.max(axis=0)
    Z_BT = jnp.sum(pieces.sum_BT * jnp.exp(pieces.max_BT - max_BT), axis=0)
    log_z_BT = max_BT + jnp.log(Z_BT)
    target_logit_BT = jnp.sum(pieces.target_logit_BT, axis=0)
    mean_logit_BT = None
    if pieces.mean_logit_BT is not None:
        mean_logit_BT = jnp.sum(pieces.mean_logit_BT, axis=0)
    tokens = Tokens(log_z_BT, target_logit_BT, targets_BT >= 0, mean_logit_BT)
    factors = options.token_loss.factors(tokens)
    softmax_BT = jnp.where(tokens.has_target, factors.softmax, 0.0)
    factors = factors._replace(softmax=softmax_BT)
    if factors.mean_logit is not None:
        by_mean_BT = jnp.where(tokens.has_target, factors.mean_logit, 0.0)
        factors = factors._replace(mean_logit=by_mean_BT)
    spec_dx, spec_dweight = gradient_specs(head_spec(options.config))
    multiply = partial(einsum, compute=head.compute_dtype, out=jnp.float32)

    def add_gradients(gradients, inputs: tuple[jax.Array, _Piece]):
        dx, dlocal = gradients
        number, piece = inputs
        part = head.slice(number)
        dlogits_BTJ = head.differentiate(part, piece, tokens, factors)
        dx += multiply(spec_dx, dlogits_BTJ, part.weight)
        dpiece = multiply(spec_dweight, x_BTD, dlogits_BTJ)
        dpiece = options.head_placement.reduce_scatter(dpiece)
        first_id = part.first_id
        dim = head.vocab_dim
        dpiece += jax.lax.dynamic_slice_in_dim(dlocal, first_id, J, dim)
        dlocal = jax.lax.dynamic_update_slice_in_dim(dlocal, dpiece, first_id, dim)
        return (dx, dlocal), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (x_BTD, local_weight))
    (dx, dlocal), _ = jax.lax.scan(add_gradients, tuple(zeros), (numbers_P, pieces))
    sums = options.sum(tokens)
    return sums, (dx.astype(x_BTD.dtype), dlocal)
