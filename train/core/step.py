"""One update: sum gradients over microbatches, then apply or skip the update."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from data.batch import Batch
from model.choices import Dropout
from model.execution import CallContext, Execution
from model.gpt import GPT, bind
from model.params import param_infos
from model.placement import Placement
from model.taps import LayerFigures, Taps
from train.core.loss.ahead import Ahead, look_ahead
from train.core.loss.loss import loss_sum
from train.core.numerics import compute_layer_metrics
from train.core.optimizer.update import Optimizer
from train.core.recipe import Recipe
from train.core.router_balance import Load, balance_experts, relative_load
from train.core.rows import (
    REPLICATED,
    reduce_over_replicas,
    reduce_over_rows,
    run_per_device,
    split,
    sum_over_microbatches,
    sum_over_rows,
)
from train.core.spikes import is_spike, remember_accepted
from train.core.state import TrainState

Metrics = dict[str, Float[Array, "..."]]


class Gradients(NamedTuple):
    """The results of a backward pass through all microbatches.

    losses: nats per target, of the model and of each prediction module.
    load_LE: the number of tokens that each expert gets, without padding. The last rows
        are those of prediction modules.
    num_targets: the number of targets in the batch.
    figures: the figures of layers that the step records (model/taps.py), or None.
    """

    losses: tuple[Float[Array, ""], ...]
    grads: Any
    load_LE: Load
    num_targets: Int[Array, ""]
    figures: LayerFigures | None


class _LossResults(NamedTuple):
    """The results of a loss besides its gradients. `Gradients` has the same fields."""

    losses: tuple[Float[Array, ""], ...]
    load_LE: Load
    figures: LayerFigures | None


class Rows(NamedTuple):
    """The rows of a batch, with an int32 seed for each position.

    ahead: what prediction modules read and predict; None if the model has none.
    """

    batch: Batch
    seeds_BT: Int[Array, "B T"] | None
    ahead: Ahead | None = None


def make_train_step(
    model: GPT,
    optimizer: Optimizer,
    execution: Execution,
    recipe: Recipe,
    seed: int,
    watched: bool = False,
    num_tokens: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch) -> (state, metrics)`, a pure function for `jit`.

    Random numbers are a function of seed, step and position. The batch's fields are
    int32 [B, T]. Metrics are float32 scalars: loss (nats per target), grad_norm (before
    clipping), learning_rate, skipped (1 if loss, norm or update was not finite, or if
    loss or norm was a spike), overflow (1 if the update was not finite) and targets
    (the number of targets). With prediction modules, ahead_loss is the mean of their
    losses, in nats per target, and `loss` does not include it. With experts,
    expert_load [layers with experts] is the number of tokens of the busiest expert
    divided by the mean. With `optimizer.qk_clip`, max_score [layers] bounds the scores
    of each layer (train/optimizers/qk_clip.py). A watched step makes the same update,
    and its metrics include figures of layers (train/core/numerics.py).
    """
    clip_scores = optimizer.clip_scores
    taps = None
    if watched or clip_scores is not None:
        taps = Taps(watched, None if clip_scores is None else model.config.num_heads)
    compute_gradients = make_gradients(model, execution, recipe, num_tokens, taps)
    has_dropout = model.config.dropout != Dropout()
    is_random = has_dropout or execution.numerics.rounds_stochastically

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        seeds_BT = None
        if is_random:
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            seeds_BT = jax.random.randint(key, batch.inputs.shape, 0, 2**31 - 1)
        results = compute_gradients(state.params, batch, seeds_BT, state.step)
        loss = results.losses[0]
        grads = results.grads
        figures = results.figures
        with jax.named_scope("gradient_norm"):
            norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        accepted = jnp.isfinite(loss) & jnp.isfinite(norm)
        recent = state.recent
        current = jnp.stack([loss, norm])
        if recent is not None and recipe.skip_sigma is not None:
            accepted &= ~is_spike(recent, current, recipe.skip_sigma)
        clip = None
        if clip_scores is not None and figures and figures.bounds is not None:
            clip = partial(clip_scores, figures.bounds)
        with jax.named_scope("optimizer"):
            params, optimizer_state, updated = optimizer.update(
                grads, norm, state.optimizer, state.params, state.step, accepted, clip
            )
        if recent is not None:
            recent = jax.tree.map(
                lambda new, old: jnp.where(updated, new, old),
                remember_accepted(recent, current),
                recent,
            )
        metrics = _batch_metrics(results) | {
            "grad_norm": norm,
            "learning_rate": optimizer.learning_rate(state.step),
            "skipped": jnp.where(updated, 0.0, 1.0),
            "overflow": jnp.where(accepted & ~updated, 1.0, 0.0),
        }
        for name, compute in recipe.metrics:
            metrics[name] = compute(state.params, grads)
        if watched and figures is not None:
            metrics |= compute_layer_metrics(figures, grads, state.params, params)
        params = balance_experts(params, results.load_LE, updated, model.config)
        return TrainState(state.step + 1, params, optimizer_state, recent), metrics

    if watched:  # Profiles recognise the compiled program by this name.
        train_step.__name__ = train_step.__qualname__ = "watched_step"
    return train_step


def _batch_metrics(gradients: Gradients) -> Metrics:
    """Return the metrics of `make_train_step` that do not depend on the update."""
    loss, *ahead_losses = gradients.losses
    targets = gradients.num_targets.astype(jnp.float32)
    metrics = {"loss": loss, "targets": targets}
    if ahead_losses:
        metrics["ahead_loss"] = jnp.mean(jnp.stack(ahead_losses))
    if gradients.load_LE is not None:
        metrics["expert_load"] = relative_load(gradients.load_LE)
    if gradients.figures is not None and gradients.figures.bounds is not None:
        metrics["max_score"] = jnp.max(gradients.figures.bounds, axis=1)
    return metrics


def _make_loss(
    model: GPT,
    execution: Execution,
    recipe: Recipe,
    taps: Taps | None,
    num_tokens: int | None,
) -> Callable[..., tuple[Float[Array, ""], _LossResults]]:
    """Return the function whose gradient a step computes.

    It maps `(params, rows, num_targets, num_routed, ahead_weight)` to the loss of local
    rows as a part of the global batch's mean, and to `_LossResults`. `num_targets` are
    the global numbers of targets of the model and of each prediction module.
    """

    def compute_loss(
        params: Any,
        rows: Rows,
        num_targets: list[Int[Array, ""]],
        num_routed: Int[Array, ""] | int,
        ahead_weight: Float[Array, ""] | None,
    ) -> tuple[Float[Array, ""], _LossResults]:
        call_taps = taps and taps.empty()
        make_keys = jax.vmap(jax.vmap(jax.random.key))
        keys_BT = None if rows.seeds_BT is None else make_keys(rows.seeds_BT)
        losses, nats, routing = loss_sum(
            bind(model, params),
            rows.batch,
            execution,
            token_loss=recipe.token_loss,
            chunk=recipe.loss_chunk_tokens,
            num_tokens=num_tokens,
            call=CallContext(keys_BT=keys_BT, taps=call_taps),
            ahead=rows.ahead,
        )
        loss, *ahead_losses = map(jnp.divide, losses, num_targets)
        if ahead_weight is not None:
            loss += ahead_weight / len(ahead_losses) * sum(ahead_losses)
        if routing is not None:
            loss += jnp.mean(routing.loss) / num_routed
        return loss, _LossResults(
            losses=tuple(map(jnp.divide, nats, num_targets)),
            load_LE=None if routing is None else routing.load_E,
            figures=call_taps and call_taps.all_figures(),
        )

    return compute_loss


def make_gradients(
    model: GPT,
    execution: Execution,
    recipe: Recipe,
    num_tokens: int | None = None,
    taps: Taps | None = None,
) -> Callable[..., Gradients]:
    """Return `compute_gradients(params, batch, seeds_BT=None, step=0) -> Gradients`.

    Each device uses its local rows; layers reduce-scatter gradients (model/gather.py).
    Replicas sum them once a step: in the backward pass, or after all microbatches.
    The figures are those that `taps` record.
    """
    placement = execution.placement
    infos = param_infos(model)
    depth = model.config.predict_ahead
    has_experts = model.config.expert_layers > 0
    load_shape = model.config.expert_layers + depth, model.config.num_experts
    compute_loss = _make_loss(model, execution, recipe, taps, num_tokens)

    def on_device(
        params: Any, rows: Rows, ahead_weight: Float[Array, ""] | None = None
    ) -> Gradients:
        with jax.named_scope("targets"):
            total_targets, num_routed = _sum_counts(rows.batch, placement, has_experts)
            num_targets = [jnp.maximum(1, total_targets)]
            if rows.ahead is not None:
                counts_P = jnp.sum(rows.ahead.targets_BTP >= 0, axis=(0, 1))
                counts_P = jnp.maximum(1, sum_over_rows(counts_P, placement))
                num_targets += jnp.unstack(counts_P)
        if placement.platform == "cpu":
            rows = _start_after_count(num_targets[0], rows)

        mean_loss = partial(
            compute_loss,
            num_targets=num_targets,
            num_routed=num_routed,
            ahead_weight=ahead_weight,
        )
        compute_grads = jax.grad(mean_loss, has_aux=True)
        if recipe.accumulation_steps == 1:
            grads, (losses, load_LE, figures) = compute_grads(params, rows)
        else:
            parts = split(rows, recipe.accumulation_steps)
            shape = load_shape if has_experts else None
            grads, (losses, load_LE, figures) = sum_over_microbatches(
                compute_grads, params, parts, num_losses=1 + depth, load_shape=shape
            )
        return Gradients(
            losses=sum_over_rows(losses, placement),
            grads=reduce_over_replicas(grads, infos, execution),
            load_LE=load_LE,
            num_targets=total_targets,
            figures=None if figures is None else reduce_over_rows(figures, placement),
        )

    def result_specs(param_specs: Any) -> Any:
        spec: Any = REPLICATED
        return Gradients(spec, param_specs, spec, spec, spec if taps else None)

    run = run_per_device(on_device, execution, infos, result_specs)

    def compute_gradients(
        params: Any,
        batch: Batch,
        seeds_BT: Int[Array, "B T"] | None = None,
        step: Int[Array, ""] | int = 0,
    ) -> Gradients:
        if not depth:
            return run(params, Rows(batch, seeds_BT))
        # Rows are whole here. On devices they may be divided, and in another order.
        ahead = look_ahead(batch.inputs, batch.targets, batch.segment_ids, depth)
        return run(params, Rows(batch, seeds_BT, ahead), recipe.ahead_weight(step))

    return compute_gradients


def _sum_counts(
    batch: Batch, placement: Placement, has_experts: bool
) -> tuple[Int[Array, ""], Int[Array, ""] | int]:
    """Return the global batch's numbers of targets and of routed positions.

    One all-reduce sums both counts. Without experts, the second count is 1.
    """
    num_targets = jnp.sum(batch.targets >= 0)
    if not has_experts:
        return sum_over_rows(num_targets, placement), 1
    if batch.segment_ids is None:
        return sum_over_rows((num_targets, batch.inputs.size), placement)
    num_routed = jnp.sum(batch.segment_ids > 0)
    counts = sum_over_rows(jnp.stack([num_targets, num_routed]), placement)
    return counts[0], jnp.maximum(1, counts[1])


def _start_after_count(num_targets: Int[Array, ""], rows: Rows) -> Rows:
    """Make the inputs depend on the target count, so that layers start after it.

    Virtual devices of a CPU share its threads. Without this dependency, the first
    device to wait for the count would run its layers on all remaining threads, and the
    other devices would be late for every following sum (docs/log).
    """
    inputs = jnp.where(num_targets > 0, rows.batch.inputs, 0)
    return rows._replace(batch=rows.batch._replace(inputs=inputs))
