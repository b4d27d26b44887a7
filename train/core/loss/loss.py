"""The loss of next tokens in float32, with a gradient that is computed at once.

Shapes: B batch, T time, D embed, V vocab.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from data.batch import Batch
from model.execution import NO_CONTEXT, CallContext, Execution
from model.gpt import GPT
from model.routing import Routing
from model.scopes import part_scope
from train.core.loss.ahead import Ahead
from train.core.loss.form import LossOptions, choose_form, largest_divisor
from train.core.loss.pieces import sum_pieces
from train.core.loss.tiles import sum_tiles
from train.core.loss.token_loss import TokenLoss


class LossSums(NamedTuple):
    """Sums over the targets of local rows, as float32 scalars.

    losses: the loss to minimize, of the model and of each prediction module.
    nats: the cross-entropies, which have no gradient.
    routing: the routing of all layers, then of modules. Its loss is not included.
    """

    losses: tuple[Float[Array, ""], ...]
    nats: tuple[Float[Array, ""], ...]
    routing: Routing | None


def loss_sum(
    model: GPT,
    batch: Batch,
    execution: Execution,
    token_loss: TokenLoss,
    chunk: int | None,
    num_tokens: int | None = None,
    call: CallContext = NO_CONTEXT,
    ahead: Ahead | None = None,
) -> LossSums:
    """Sum the loss over a batch's targets; negative targets are ignored.

    Args:
        model: the model with bound parameters.
        batch: int32 [B, T] fields.
        execution: how the program runs the model.
        token_loss: the loss of a token, as a function of its logits.
        chunk: the largest number of positions of a row whose logits exist at once.
            None chooses a form (train/core/loss/form.py).
        num_tokens: the number of ids that the tokenizer has. Larger ids only pad the
            vocabulary and have no probability. None: the whole vocabulary.
        call: the random keys and taps of this call.
        ahead: what prediction modules read and predict. None: they do not run.
    """
    x_BTD, _, routing = model.features(
        batch.inputs, batch.positions, batch.segment_ids, execution, call=call
    )
    options = _make_options(model, x_BTD, execution, chunk, num_tokens)
    options = options._replace(token_loss=token_loss)
    predictions = [(x_BTD, batch.targets)]
    if ahead is not None:
        features, ahead_routing = model.features_ahead(
            x_BTD, ahead.tokens_BTP, batch.positions, batch.segment_ids, execution, call
        )
        targets = jnp.unstack(ahead.targets_BTP, axis=-1)
        predictions += zip(features, targets, strict=True)
        if routing is not None and ahead_routing is not None:
            join = partial(jax.tree.map, lambda *parts: jnp.concatenate(parts))
            routing = join(routing, ahead_routing)
    with jax.named_scope("loss"), part_scope("head"):
        sums: list[tuple[jax.Array, jax.Array]] = [
            _sums(options, x_BTD, model.head_weight, targets_BT)
            for x_BTD, targets_BT in predictions
        ]
    losses, nats = zip(*sums, strict=True)
    return LossSums(losses, nats, routing)


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
    options = _make_options(model, x_BTD, execution, chunk, num_tokens)
    options = options._replace(by_row=True)
    with jax.named_scope("loss"), part_scope("head"):
        weight = options.gather(model.head_weight)
        return sum_tiles(options, x_BTD, weight, batch.targets, gradients=False)[0]


def _make_options(
    model: GPT,
    x_BTD: Float[Array, "B T D"],
    execution: Execution,
    chunk: int | None,
    num_tokens: int | None,
) -> LossOptions:
    """Return the options of the loss for features of this shape."""
    config = model.config
    B, T, _ = x_BTD.shape
    rows = execution.placement.microbatch_shape or (B, T)
    form = choose_form(config, execution, rows, chunk)
    # Evaluations may have rows of another length.
    form = form._replace(positions=largest_divisor(T, form.positions))
    num_tokens = num_tokens or config.vocab_size or 0
    return LossOptions(form, config, execution, model.head_axes, num_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(options: LossOptions, x_BTD, local_weight, targets_BT):
    weight = options.gather(local_weight)
    return sum_tiles(options, x_BTD, weight, targets_BT, gradients=False)[0]


def _forward(options: LossOptions, x_BTD, local_weight, targets_BT):
    # Compute the gradients here, so that logits are computed only once. The loss is a
    # sum, so the backward pass only multiplies them by the cotangent.
    if options.form.ids is not None:
        sums, (dx_BTD, dlocal) = sum_pieces(options, x_BTD, local_weight, targets_BT)
    else:
        weight = options.gather(local_weight)
        results: Any = sum_tiles(options, x_BTD, weight, targets_BT, gradients=True)
        sums, (dx_BTD, dweight) = results
        dlocal = options.head_placement.reduce_scatter(dweight)
    dlocal = dlocal.astype(local_weight.dtype)
    # Without this barrier, the float32 gradient lives until the backward pass ends.
    return sums, jax.lax.optimization_barrier((dx_BTD, dlocal))


def _backward(options: LossOptions, gradients, cotangents):
    factor, _ = cotangents
    dx, dweight = jax.tree.map(lambda x: (factor * x).astype(x.dtype), gradients)
    return dx, dweight, None


_sums.defvjp(_forward, _backward)
