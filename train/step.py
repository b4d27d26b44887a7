"""One update: gradients over microbatches, the optimizer, and the guard around both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from data.batches import Batch
from model.choices import Dropout
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.gpt import GPT, bind
from model.params import param_infos
from model.placement import Placement
from model.taps import Noted, Taps
from train.config import TrainConfig
from train.loss import loss_sum, row_sums
from train.numerics import numerics
from train.optimizer.update import Optimizer
from train.rows import (
    REPLICATED,
    reduce_over_replicas,
    reduce_over_rows,
    run_per_device,
    split,
    sum_over_microbatches,
    sum_over_rows,
)
from train.spikes import is_spike, remember
from train.state import TrainState

Load = Float[Array, "L E"] | None
Metrics = dict[str, Float[Array, "..."]]


def make_train_step(
    model: GPT,
    optimizer: Optimizer,
    execution: Execution,
    config: TrainConfig,
    seed: int,
    watched: bool = False,
    num_tokens: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Build `train_step(state, batch) -> (state, metrics)`, pure, meant for `jit`.

    What it draws at random is a function of seed, step and position.

    The batch's fields are int32 [B, T]. Metrics are float32 scalars: loss (nats per
    target), grad_norm (before clipping), learning_rate, skipped (1 if the update was
    left out: one of the first two was not finite or a spike, or the update overflows),
    overflow (1 if that was why), targets (how many the batch has). With experts also
    expert_load, of each layer that has them: the tokens of the expert that got
    most over the mean. A watched step makes the same update, and has figures of its
    layers besides (train/numerics.py).
    """
    gradients = make_gradients(model, execution, config, watched, num_tokens)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        seeds_BT = None
        if (
            execution.numerics.rounds_stochastically
            or model.config.dropout != Dropout()
        ):
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            seeds_BT = jax.random.randint(key, batch.inputs.shape, 0, 2**31 - 1)
        loss, grads, load, num_targets, *noted = gradients(
            state.params, batch, seeds_BT
        )
        with jax.named_scope("gradient_norm"):
            norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        accepted, recent = jnp.isfinite(loss) & jnp.isfinite(norm), state.recent
        now = jnp.stack([loss, norm])
        if recent is not None and config.skip_sigma is not None:
            accepted &= ~is_spike(recent, now, config.skip_sigma)
        with jax.named_scope("optimizer"):
            params, opt, fine = optimizer.update(
                grads, norm, state.optimizer, state.params, state.step, accepted
            )
        overflow = accepted & ~fine
        accepted = fine
        if recent is not None:
            recent = jax.tree.map(
                lambda new, old: jnp.where(accepted, new, old),
                *(remember(recent, now), recent),
            )
        of_layers = {}
        if noted:
            of_layers = numerics(noted[0], grads, state.params, params)
        params = balanced(params, load, accepted, model.config)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": optimizer.learning_rate(state.step),
            "skipped": jnp.where(accepted, 0.0, 1.0),
            "overflow": jnp.where(overflow, 1.0, 0.0),
            "targets": num_targets.astype(jnp.float32),
        }
        if load is not None:
            metrics["expert_load"] = jnp.max(load, axis=1) / jnp.maximum(
                jnp.mean(load, axis=1),
                1e-9,  # a batch may be all padding
            )
        return TrainState(state.step + 1, params, opt, recent), metrics | of_layers

    if watched:  # the compiled program bears this name: profiles tell it apart
        train_step.__name__ = train_step.__qualname__ = "watched_step"
    return train_step


def make_gradients(
    model: GPT,
    execution: Execution,
    config: TrainConfig,
    watched: bool = False,
    num_tokens: int | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Build `gradients(params, batch, seeds_BT=None)`.

    It returns the loss, its gradients, the load and the number of targets, of all
    microbatches. The load is how many tokens each expert got, [L, E], without padding;
    None without experts. What is drawn at random has int32 seeds, one a position.
    Where layers are watched, what they noted comes after these (model/taps.py).

    Each device takes its own rows: weights are gathered and their gradients scattered
    where they are used (model/gather.py). Copies along other axes (data) add up once a
    step: those of a layer's matrices in its backward pass, beside the products of the
    next one, or where there are several microbatches behind all of them.
    """

    placement = execution.placement

    def gradients(params: Any, rows: tuple[Batch, jax.Array | None]):
        batch, _ = rows
        with jax.named_scope("targets"):
            found, num_counted = _counts(batch, placement, routed=shape[0] > 0)
            num_targets = jnp.maximum(1, found)
        rows = after_count(num_targets, rows) if placement.platform == "cpu" else rows

        def mean_loss(
            params: Any, rows: tuple[Batch, jax.Array | None]
        ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Load, Noted | None]]:
            bound, chunk = bind(model, params), config.loss_chunk_tokens
            taps = Taps() if watched else None
            (part, seeds_BT), keys_BT = rows, None
            if seeds_BT is not None:
                keys_BT = jax.vmap(jax.vmap(jax.random.key))(seeds_BT)
            loss, nats, routing = loss_sum(
                bound,
                part,
                execution,
                z_loss=config.z_loss,
                chunk=chunk,
                num_tokens=num_tokens,
                call=CallContext(keys_BT=keys_BT, taps=taps),
            )
            loss, load = loss / num_targets, None
            if routing is not None:
                loss += jnp.mean(routing.loss) / num_counted
                load = routing.load_E
            return loss, (nats / num_targets, load, taps and taps.of_stacks())

        value_and_grad = jax.grad(mean_loss, has_aux=True)
        if config.accumulation_steps == 1:
            grads, (loss, load, noted) = value_and_grad(params, rows)
        else:
            parts = split(rows, config.accumulation_steps)
            grads, (loss, load, noted) = sum_over_microbatches(
                value_and_grad, params, parts, load_shape=shape if shape[0] else None
            )
        loss = sum_over_rows(loss, placement)
        grads = reduce_over_replicas(grads, infos, execution)
        result = loss, grads, load, found
        return (
            result if noted is None else (*result, reduce_over_rows(noted, placement))
        )

    infos = param_infos(model)
    shape = model.config.expert_layers, model.config.num_experts

    def results(specs: Any) -> Any:
        return REPLICATED, specs, REPLICATED, REPLICATED, *[REPLICATED] * watched

    on_devices = run_per_device(gradients, execution, infos, results)
    return lambda params, batch, seeds_BT=None: on_devices(params, (batch, seeds_BT))


def _counts(
    batch: Batch, placement: Placement, routed: bool
) -> tuple[Int[Array, ""], Int[Array, ""] | int]:
    """Count the targets of all devices' rows, and the positions that routers balance.

    One all-reduce does both. Positions that are not `routed` need no count.
    """
    num_targets = jnp.sum(batch.targets >= 0)
    if not routed:
        return sum_over_rows(num_targets, placement), 1
    if batch.segment_ids is None:
        return sum_over_rows((num_targets, batch.inputs.size), placement)
    num_counted = jnp.sum(batch.segment_ids > 0)
    both = sum_over_rows(jnp.stack([num_targets, num_counted]), placement)
    return both[0], jnp.maximum(1, both[1])


def after_count(
    num_targets: Int[Array, ""], rows: tuple[Batch, jax.Array | None]
) -> tuple[Batch, jax.Array | None]:
    """Return the same rows, with which XLA cannot compute before the count is there.

    Virtual devices of a CPU share its threads. The first one to wait for the others'
    counts would else go on with its layers on all threads that are left, and the others
    would be late for every sum that follows (docs/log.md).
    """
    batch, seeds_BT = rows
    inputs = jnp.where(num_targets > 0, batch.inputs, 0)
    return batch._replace(inputs=inputs), seeds_BT


def balanced(
    params: Any, load_LE: Load, accepted: jax.Array, config: ModelConfig
) -> Any:
    """Return parameters in which experts with too few tokens are likelier chosen.

    A step that is not accepted changes nothing.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    if load_LE is None or not config.router_bias_rate:
        return params
    missing_LE = jnp.sign(jnp.mean(load_LE, axis=1, keepdims=True) - load_LE)
    layers = params["layers"]
    mlp, router = layers["mlp"], layers["mlp"]["router"]
    bias_LE = router["balance"]
    moved = bias_LE + config.router_bias_rate * missing_LE
    moved = jnp.where(accepted, moved, bias_LE)
    layers = layers | {"mlp": mlp | {"router": router | {"balance": moved}}}
    return params | {"layers": layers}


def make_eval_step(
    model: GPT,
    execution: Execution,
    config: TrainConfig,
    num_tokens: int | None = None,
) -> Callable[[Any, Batch], tuple[Float[Array, ""], Int[Array, ""]]]:
    """Build `eval_step(params, batch) -> (sum of nats, number of targets)`.

    It runs in the microbatches of a train step: what fits the memory there fits it
    here. `num_tokens` is as in `loss_sum`.
    """
    microbatches = config.accumulation_steps

    def eval_step(params: Any, batch: Batch):
        def sums(part: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
            chunk = config.loss_chunk_tokens
            bound = bind(model, params)
            _, nats, _ = loss_sum(bound, part, execution, 0.0, chunk, num_tokens)
            return nats, jnp.sum(part.targets >= 0)

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, sums(part)), None

        if microbatches == 1:
            return sum_over_rows(sums(batch), execution.placement)
        start = jnp.float32(0), jnp.int32(0)
        with jax.named_scope("microbatches"):
            total, _ = jax.lax.scan(add, start, split(batch, microbatches))
        return sum_over_rows(total, execution.placement)

    return run_per_device(
        eval_step, execution, param_infos(model), lambda specs: REPLICATED
    )


def make_score_step(
    model: GPT, execution: Execution, config: TrainConfig, num_tokens: int | None
) -> Callable[[Any, Batch], tuple[Float[Array, "B"], Float[Array, "B"]]]:
    """Build `score_step(params, batch) -> (nats, misses)` of each row, as `row_sums`.

    `num_tokens` is as in `loss_sum`.
    """

    def score_step(params: Any, batch: Batch):
        chunk = config.loss_chunk_tokens
        sums = row_sums(bind(model, params), batch, execution, num_tokens, chunk)
        return jax.lax.psum(
            sums, execution.placement.sequence_axes
        )  # each has parts of rows

    rows = execution.placement.rules.spec("batch")
    return run_per_device(score_step, execution, param_infos(model), lambda specs: rows)
