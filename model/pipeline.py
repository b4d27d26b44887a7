"""Stages of layers on different devices, and microbatches that pass through them.

The devices along one mesh axis (the one on which parameters' `layers` lie) are the
stages. Microbatches enter the first stage one after another, and each stage hands what
it made to the next: S stages have run M microbatches after M + S - 1 iterations of one
loop. In S - 1 of these a stage has nothing to do (the bubble). With R repeats a stage
has R groups of layers, the stages between two of them those of the other stages, and
microbatches go round R times: R M + S - 1 iterations, each an R-th as long.

A device starts with its own rows of the batch, as along `data`: M/S microbatches. In
each iteration one of them moves a stage towards the first, and what the last stage made
moves behind them; so each device ends with the features of its own rows. Nothing of the
bubble is read: it runs on zeros, and adds zeros to every gradient.

Source: GPipe, arXiv:1811.06965; circular stages: arXiv:2104.04473, section 2.2.

Shapes: B batch, T time, D embed, S stages, M microbatches, R repeats, L layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import Execution
from model.experts.router import Routing
from model.parts import part
from model.remat import rematerialized_stage
from model.taps import Noted, Taps

Run = Callable[
    [Any, jax.Array, Any, jax.Array, Execution], tuple[jax.Array, Routing | None]
]


def run_pipeline(
    run: Run, params: Any, x_BTD: Float[Array, "B T D"], rows: Any, how: Execution
) -> tuple[Float[Array, "B T D"], Routing | None]:
    """Run layers that lie on the stages of a pipeline.

    Args:
        run: (layers' parameters, x, rows, group, how) -> (x, what routers did), of some
            rows; the group's number is that of its layers among those of all stages.
        params: tree of a device's own layers, [L/S, ...] each.
        x_BTD: what goes in, of a device's own rows.
        rows: tree of int32 [B, T], what layers need to know of these.
        how: execution, by hand along the stages' axis.

    Returns:
        x_BTD behind the last layer, of a device's own rows; and what the routers of all
        L layers did: the load of all stages, the loss of the own one alone.
    """
    ((_, (axis,)),) = how.rules.cut(("layers",))
    S, M, R = jax.lax.psum(1, axis), how.pipeline_microbatches, how.pipeline_repeats
    turns, waits, stage = M // S, (M - S) * (R > 1), jax.lax.axis_index(axis)
    inside = how._replace(rules=how.rules.inside(axis))
    onwards = [(s, (s + 1) % S) for s in range(S if R > 1 else S - 1)]
    back = [(s, s - 1) for s in range(1, S)]
    stream = x_BTD.reshape(turns, -1, *x_BTD.shape[1:])

    def of_all(ids_BT: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(ids_BT, axis, tiled=True)
        return whole.reshape(M, stream.shape[1], *ids_BT.shape[1:])

    with part("pipeline"):
        keys = None if how.keys_BT is None else jax.random.key_data(how.keys_BT)
        rows_keys = jax.tree.map(of_all, (rows, keys))
        params = dealt(params, axis, R) if R > 1 else params

    run_stage = _make_stage(run, inside, stage, S, R)

    def iterate(carry, t: jax.Array):
        stream, arrived, waiting = carry
        number = t - stage  # of the pass that the stage is at: M of each repeat
        at_work = (number >= 0) & (number < R * M)
        first = _at(stream, t % turns)
        entering = first
        if R > 1:
            again = _at(waiting, t % waits) if waits else arrived
            entering = jnp.where(t < M, first, again)
        x = jnp.where(stage == 0, entering, arrived)
        x = jnp.where(at_work, x, 0)
        own = jax.tree.map(lambda ids: _at(ids, number % M), rows_keys)
        repeat = jnp.clip(number // M, 0, R - 1)
        y, routing, noted = run_stage(params, x, own, repeat)
        if waits:
            waiting = _put(waiting, arrived, t % waits)
        with part("pipeline"):
            arrived = jax.lax.ppermute(y, axis, onwards)
            moved = jax.lax.ppermute(first, axis, back)
        stream = _put(stream, jnp.where(stage == S - 1, y, moved), t % turns)
        return (stream, arrived, waiting), (routing, noted)

    arrived = jnp.zeros_like(stream[0])
    start = stream, arrived, jnp.zeros((waits, *arrived.shape), arrived.dtype)
    with jax.named_scope("stages"):
        iterations = jnp.arange(R * M + S - 1)
        (stream, _, _), done = jax.lax.scan(iterate, start, iterations)
    # The last stage began S - 1 iterations late, and with it its place in the stream.
    x_BTD = jnp.roll(stream, 1 - S, axis=0).reshape(x_BTD.shape)
    of_own = partial(_of_own_layers, stage=stage, sizes=(R, S, M))
    return x_BTD, _of_all_stages(*done, of_own, how.taps, axis)


def _make_stage(
    run: Run, how: Execution, stage: jax.Array, stages: int, repeats: int
) -> Callable[..., Any]:
    """Return what runs a stage's layers of one repeat on one microbatch."""

    def run_stage(params: Any, x: jax.Array, rows_keys: Any, repeat: jax.Array):
        # Also of a single group: what does not depend on the iteration (each layer's
        # gathered weights) jax would compute, and keep, before the loop.
        group = jax.tree.map(lambda own: _group(own, repeat, repeats), params)
        rows, keys = rows_keys
        keys_BT = None if keys is None else jax.random.wrap_key_data(keys)
        taps = None if how.taps is None else Taps()
        own = how._replace(keys_BT=keys_BT, taps=taps)
        y, routing = run(group, x, rows, repeat * stages + stage, own)
        return y, routing, taps and taps.of_stacks()

    return rematerialized_stage(run_stage, how.remat)


def _of_all_stages(
    routing: Routing | None,
    noted: Noted | None,
    of_own: Callable[..., Any],
    taps: Taps | None,
    axis: str,
) -> Routing | None:
    """Note what all layers noted; return the load of all, and the loss of the own."""
    if taps is not None and noted is not None:
        noted = noted.reduced(
            lambda each: jax.lax.pmax(of_own(each, jnp.max), axis),
            lambda each: jax.lax.psum(of_own(each, jnp.mean), axis),
        )
        taps.put(noted)
    if routing is None:
        return None
    load, loss = jax.tree.map(of_own, routing)
    return Routing(jax.lax.psum(load, axis), loss)


def _of_own_layers(
    each: jax.Array,
    over: Callable[..., jax.Array] = jnp.sum,
    *,
    stage: jax.Array,
    sizes: tuple[int, int, int],
) -> jax.Array:
    """Bring [iterations, L/(R S), ...] to [L, ...]; zero where layers lie apart.

    over: what makes one of all microbatches; sizes: R, S, M.
    """
    R, S, M = sizes
    each = jax.lax.dynamic_slice_in_dim(each, stage, R * M)
    own = over(each.reshape(R, M, *each.shape[1:]), axis=1)
    whole = jnp.zeros((R, S, *own.shape[1:]), own.dtype).at[:, stage].set(own)
    return whole.reshape(-1, *own.shape[2:])


def dealt(params: Any, axis: str, repeats: int) -> Any:
    """Exchange groups of layers, so that each stage has every S-th of them.

    The state has neighbouring layers on a device whatever the number of repeats, so
    that there is one layout of checkpoints; the step brings W[L/S, ...] to the order in
    which they run, and its gradient back. The R groups of each of the S devices travel
    in R permutes: in each of them every device sends one group and gets one.

    Args:
        params: tree of [L/S, ...], neighbouring layers.
        axis: of the stages.
        repeats: R.
    """
    S, stage = jax.lax.psum(1, axis), jax.lax.axis_index(axis)
    wide = S // math.gcd(repeats, S)

    def deal(own: jax.Array) -> jax.Array:
        groups = own.reshape(repeats, -1, *own.shape[1:])
        result = jnp.zeros_like(groups)
        for first in range(repeats):
            sent = [(first + s // wide) % repeats for s in range(S)]
            places = [s * repeats + i for s, i in enumerate(sent)]
            pairs = [(s, place % S) for s, place in enumerate(places)]
            repeat = [place // S for place in sorted(places, key=lambda p: p % S)]
            group = _at(groups, jnp.asarray(sent)[stage])
            group = jax.lax.ppermute(group, axis, pairs)
            result = _put(result, group, jnp.asarray(repeat)[stage])
        return result.reshape(own.shape)

    return jax.tree.map(deal, params)


def _group(own: jax.Array, repeat: jax.Array, repeats: int) -> jax.Array:
    size = own.shape[0] // repeats
    return jax.lax.dynamic_slice_in_dim(own, repeat * size, size)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)
