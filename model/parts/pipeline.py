"""Pipeline parallelism: stages of layers on different devices, and microbatches.

The devices along one mesh axis, over which the `layers` dim of parameters is sharded,
are the stages. Microbatches enter the first stage one after another, and each stage
sends its output to the next one. S stages have run M microbatches after M + S - 1
iterations of one loop. Each stage is idle in S - 1 of these iterations (the bubble).
With R repeats, a stage has R groups of layers, interleaved with the groups of the other
stages, and microbatches pass through all stages R times. This takes R M + S - 1
iterations, each of which runs 1/R of a stage's layers.

A device starts with its local rows of the batch, which are M/S microbatches. In each
iteration, each device sends one of its microbatches to the previous stage, so that all
microbatches reach the first stage. The last stage stores its output in the slot that
becomes free. In the end, each device has the features of its local rows. In the bubble
a stage computes on zeros, which add zeros to every gradient. The result is not read.

Source: GPipe, arXiv:1811.06965; circular stages: arXiv:2104.04473, section 2.2.

Shapes: B batch, T time, D embed, S stages, M microbatches, R repeats, L layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import NO_CONTEXT, CallContext, Execution, RunGroup
from model.remat import rematerialized_stage
from model.routing import Routing
from model.scopes import part_scope
from model.taps import LayerFigures, Taps


class _Microbatch(NamedTuple):
    """The inputs per position of one microbatch, or [M, ...] of all microbatches."""

    positions_BT: jax.Array | None
    segment_ids_BT: jax.Array | None
    key_data_BT: jax.Array | None


@dataclass(frozen=True)
class CircularPipeline:
    """Microbatches that pass through all stages R times; a `Pipeline`.

    microbatches: the number M of microbatches, a multiple of the number of stages.
    repeats: the number R of groups of layers on each stage.
    """

    microbatches: int
    repeats: int = 1

    def run(
        self,
        run_group: RunGroup,
        params: Any,
        x_BTD: Float[Array, "B T D"],
        positions_BT: jax.Array | None,
        execution: Execution,
        *,
        call: CallContext = NO_CONTEXT,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Run all layers as `Pipeline.run` does."""
        axis = execution.placement.stage_axis
        assert axis is not None
        S = jax.lax.psum(1, axis)
        M = self.microbatches
        R = self.repeats
        num_local = M // S
        num_waiting = (M - S) * (R > 1)
        stage = jax.lax.axis_index(axis)
        to_next = [(s, (s + 1) % S) for s in range(S if R > 1 else S - 1)]
        to_previous = [(s, s - 1) for s in range(1, S)]
        stream = x_BTD.reshape(num_local, -1, *x_BTD.shape[1:])

        microbatches = _gather_microbatches(
            positions_BT, call, axis, shape=(M, stream.shape[1])
        )
        if R > 1:
            with part_scope("pipeline"):
                params = interleave_layers(params, axis, R)
        run_stage = _make_stage(
            run_group, execution, call, stage=stage, num_stages=S, repeats=R
        )

        def iterate(carry, t: jax.Array):
            stream, from_previous, waiting = carry
            pass_index = t - stage  # One pass for each repeat and microbatch.
            is_busy = (pass_index >= 0) & (pass_index < R * M)
            entering = outgoing = _read(stream, t % num_local)
            if R > 1:
                repeated = (
                    _read(waiting, t % num_waiting) if num_waiting else from_previous
                )
                entering = jnp.where(t < M, outgoing, repeated)
            x = jnp.where(stage == 0, entering, from_previous)
            x = jnp.where(is_busy, x, 0)
            microbatch = jax.tree.map(
                lambda ids: _read(ids, pass_index % M), microbatches
            )
            repeat = jnp.clip(pass_index // M, 0, R - 1)
            y, routing, figures = run_stage(params, x, microbatch, repeat)
            if num_waiting:
                waiting = _write(waiting, from_previous, t % num_waiting)
            with part_scope("pipeline"):
                from_previous = jax.lax.ppermute(y, axis, to_next)
                from_next = jax.lax.ppermute(outgoing, axis, to_previous)
            stream = _write(
                stream, jnp.where(stage == S - 1, y, from_next), t % num_local
            )
            return (stream, from_previous, waiting), (routing, figures)

        from_previous = jnp.zeros_like(stream[0])
        waiting = jnp.zeros((num_waiting, *stream.shape[1:]), stream.dtype)
        carry = stream, from_previous, waiting
        with jax.named_scope("stages"):
            iterations = jnp.arange(R * M + S - 1)
            (stream, _, _), outputs = jax.lax.scan(iterate, carry, iterations)
        # The last stage began S - 1 iterations late, which shifts its outputs by S - 1.
        x_BTD = jnp.roll(stream, 1 - S, axis=0).reshape(x_BTD.shape)
        routing, figures = outputs
        place_layers = partial(_place_local_layers, stage=stage, sizes=(R, S, M))
        return x_BTD, _reduce_stages(routing, figures, place_layers, call.taps, axis)


def _gather_microbatches(
    positions_BT: Any, call: CallContext, axis: str, *, shape: tuple[int, int]
) -> _Microbatch:
    """Return the inputs per position of all microbatches, as [M, rows, ...]."""

    def gather(ids_BT: jax.Array) -> jax.Array:
        gathered = jax.lax.all_gather(ids_BT, axis, tiled=True)
        return gathered.reshape(*shape, *ids_BT.shape[1:])

    with part_scope("pipeline"):
        keys_BT = call.keys_BT
        key_data_BT = None if keys_BT is None else jax.random.key_data(keys_BT)
        inputs = _Microbatch(positions_BT, call.segment_ids_BT, key_data_BT)
        return jax.tree.map(gather, inputs)


def _make_stage(
    run_group: RunGroup,
    execution: Execution,
    call: CallContext,
    *,
    stage: jax.Array,
    num_stages: int,
    repeats: int,
) -> Callable[..., Any]:
    """Return the function that runs a stage's layers on one microbatch."""

    def run_stage(
        params: Any, x: jax.Array, microbatch: _Microbatch, repeat: jax.Array
    ):
        # Slice the layers even if there is only one group. Otherwise JAX would compute
        # values that do not depend on the iteration, such as gathered weights, before
        # the loop, and they would stay in memory.
        group_params = jax.tree.map(lambda w: _slice_group(w, repeat, repeats), params)
        positions_BT, segment_ids_BT, key_data_BT = microbatch
        keys_BT = None if key_data_BT is None else jax.random.wrap_key_data(key_data_BT)
        stage_call = call._replace(
            segment_ids_BT=segment_ids_BT,
            keys_BT=keys_BT,
            taps=call.taps and call.taps.empty(),
        )
        group_number = repeat * num_stages + stage
        y, routing = run_group(group_params, x, positions_BT, group_number, stage_call)
        return y, routing, stage_call.taps and stage_call.taps.all_figures()

    return rematerialized_stage(run_stage, execution.remat)


def _reduce_stages(
    routing: Routing | None,
    figures: LayerFigures | None,
    place_layers: Callable[..., Any],
    taps: Taps | None,
    axis: str,
) -> Routing | None:
    """Record the statistics of all layers, and return the routing of `Pipeline.run`."""
    if taps is not None and figures is not None:
        figures = figures.reduce(
            lambda values: jax.lax.pmax(place_layers(values, jnp.max), axis),
            lambda values: jax.lax.psum(place_layers(values, jnp.mean), axis),
        )
        taps.add_segment(figures)
    if routing is None:
        return None
    load, loss = jax.tree.map(place_layers, routing)
    return Routing(jax.lax.psum(load, axis), loss)


def _place_local_layers(
    values: jax.Array,
    reduce: Callable[..., jax.Array] = jnp.sum,
    *,
    stage: jax.Array,
    sizes: tuple[int, int, int],
) -> jax.Array:
    """Convert [iterations, L/(R S), ...] to [L, ...]; layers of other stages get 0.

    `reduce` reduces over microbatches, and `sizes` are R, S and M.
    """
    R, S, M = sizes
    values = jax.lax.dynamic_slice_in_dim(values, stage, R * M)
    values = reduce(values.reshape(R, M, *values.shape[1:]), axis=1)
    layers = jnp.zeros((R, S, *values.shape[1:]), values.dtype).at[:, stage].set(values)
    return layers.reshape(-1, *values.shape[2:])


def interleave_layers(params: Any, axis: str, repeats: int) -> Any:
    """Exchange parameters between stages, so that each stage has every S-th group.

    In the training state, a device always has consecutive layers, so that checkpoints
    have the same layout for any number of repeats. The training step converts the local
    W[L/S, ...] to the order in which layers run. Its derivative converts the gradient
    back. In each of R permutes, every device sends one group and receives one.
    """
    S = jax.lax.psum(1, axis)
    stage = jax.lax.axis_index(axis)
    period = S // math.gcd(repeats, S)

    def interleave(shard: jax.Array) -> jax.Array:
        groups = shard.reshape(repeats, -1, *shard.shape[1:])
        result = jnp.zeros_like(groups)
        for offset in range(repeats):
            sent_slots = [(offset + s // period) % repeats for s in range(S)]
            numbers = [s * repeats + slot for s, slot in enumerate(sent_slots)]
            pairs = [(s, number % S) for s, number in enumerate(numbers)]
            by_receiver = sorted(numbers, key=lambda number: number % S)
            received_slots = [number // S for number in by_receiver]
            group = _read(groups, jnp.asarray(sent_slots)[stage])
            group = jax.lax.ppermute(group, axis, pairs)
            result = _write(result, group, jnp.asarray(received_slots)[stage])
        return result.reshape(shard.shape)

    return jax.tree.map(interleave, params)


def _slice_group(layers: jax.Array, repeat: jax.Array, repeats: int) -> jax.Array:
    size = layers.shape[0] // repeats
    return jax.lax.dynamic_slice_in_dim(layers, repeat * size, size)


def _read(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _write(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)
