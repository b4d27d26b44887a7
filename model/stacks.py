"""Stacks of layers, run by one scan.

Shapes: B batch, T time, D embed, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues
from model.attention.masks import Local
from model.block import Block
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.experts.router import Routing
from model.remat import layer_input, rematerialized
from model.rope import Rotations
from model.scopes import in_branch
from model.taps import Taps


def make_stack(config: ModelConfig, depth: int, routed: bool, rngs: nnx.Rngs) -> Block:
    """Make layers of one kind, their parameters stacked."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, routed, rngs)

    return stack(rngs)


def depth_of(stack: Block) -> int:
    """Return how many layers are stacked."""
    return stack.attention.query.weight.shape[0]


def groups_of(stacks: Sequence[Block]) -> tuple[int, list[int]]:
    """Return how many groups of layers stacks make, and how many layers of each in one.

    A group ends with a layer of the last stack.
    """
    groups = depth_of(stacks[-1])
    return groups, [depth_of(stack) // groups for stack in stacks]


def run_stacks(
    stacks: Sequence[Block],
    x_BTD: Float[Array, "B T D"],
    by: Rotations | None,
    segment_ids_BT: Int[Array, "B T"] | None,
    execution: Execution,
    call: CallContext,
    caches: Sequence[KeysValues] | None,
    local: Sequence[bool],
    precise: Sequence[bool],
    unroll: int,
    first: jax.Array | int = 0,
) -> tuple[Float[Array, "B T D"], tuple[KeysValues, ...] | None, Routing | None]:
    """Run stacked layers by a loop, in each iteration whole groups.

    Args:
        stacks: of one kind of layers each.
        x_BTD: what goes in.
        by: rotations of queries and keys.
        segment_ids_BT: documents.
        execution: how the program runs.
        call: the context of this call.
        caches: of the layers in each place of a group.
        local: which layers are local, in the order in which they run; the loop is told
            so one by one, unless those in the same place of each group are alike.
        precise: which have no products of eight bits, likewise; of a pipeline's, those
            of all stages.
        unroll: layers in each iteration, if that is a group; -1: all, without a loop.
        first: number of the first of these layers, for what is drawn at random.

    Returns:
        x_BTD, the longer caches if there were any, and what the routers of the last
        stack did, if it has some.
    """
    groups, sizes = groups_of(stacks)
    size = sum(sizes)
    blocks, params = zip(*map(nnx.split, stacks), strict=True)
    blocks = [block for block, n in zip(blocks, sizes, strict=True) for _ in range(n)]
    unroll = groups if unroll == -1 else min(max(unroll // size, 1), groups)
    # Of several layers a backward pass has one at a time recomputed.
    looped = unroll < groups and size == 1
    group = _Group(
        blocks=blocks,
        sizes=sizes,
        by=by,
        segment_ids_BT=segment_ids_BT,
        execution=execution,
        call=call,
        local=local,
        precise=precise,
        looped=looped,
    )
    numbers = [first + jnp.arange(i, groups * size, size) for i in range(size)]
    stacked = [
        tree if n == 1 else jax.tree.map(partial(_cut, n), tree)
        for tree, n in zip(params, sizes, strict=True)
    ]
    nothing = [None] * size
    with jax.named_scope("layers"):
        x_BTD, (longer, routing, noted) = jax.lax.scan(
            group,
            x_BTD,
            (
                nothing if call.keys_BT is None else numbers,
                stacked,
                caches or nothing,
                _flags(local, size, groups, 0),
                _flags(precise, size, groups, first // size),
            ),
            unroll=True if unroll == groups else unroll,
        )
    if call.taps is not None:
        call.taps.put(jax.tree.map(lambda *each: jnp.stack(each, 1).ravel(), *noted))
    return x_BTD, longer if caches else None, routing


@dataclass(frozen=True, eq=False)
class _Group:
    """What each iteration of the loop runs: a layer in each place of a group."""

    blocks: Sequence[Any]  # of each place, without parameters
    sizes: Sequence[int]  # layers of each stack in a group
    by: Rotations | None
    segment_ids_BT: Int[Array, "B T"] | None
    execution: Execution
    call: CallContext
    local: Sequence[bool]
    precise: Sequence[bool]
    looped: bool  # whether one layer is an iteration

    def __call__(self, x_BTD: Float[Array, "B T D"], of_group):
        numbers, params, caches, *flags = of_group
        pairs = zip(params, self.sizes, strict=True)
        params = [own for stack, n in pairs for own in _each(stack, n)]
        rests = list[Any]()
        for place, of in enumerate(zip(numbers, params, caches, *flags, strict=True)):
            layer = rematerialized(
                partial(self._layer, place),
                self.execution.remat,
                self.execution.offload,
                looped=self.looped,
                branches=of[-1] is not None,
            )
            x_BTD, rest = layer(x_BTD, of)
            rests.append(rest)
        caches, routings, noted = zip(*rests, strict=True)
        return x_BTD, (caches, routings[-1], noted)

    def _layer(self, place: int, x_BTD: Float[Array, "B T D"], of_layer):
        number, params, cache, flag, kept = of_layer
        size = len(self.blocks)
        call = self.call if number is None else self.call.fold_in(number)
        local = Local(flag, sum(self.local), len(self.local))
        here = self.local[place] if flag is None else local

        def run(x_BTD: Float[Array, "B T D"], params: Any, cache: Any, precise: bool):
            taps = None if call.taps is None else Taps(exact=precise)
            block = nnx.merge(self.blocks[place], params)
            x_BTD, *rest = block(
                x_BTD,
                self.by,
                self.segment_ids_BT,
                execution=self.execution,
                call=call._replace(taps=taps, high_precision=precise),
                cache=cache,
                local=here,
            )
            return x_BTD, (*rest, taps and taps.of_layer())

        arguments, precise = (layer_input(x_BTD), params, cache), self.precise
        if kept is None:
            return run(*arguments, precise=precise[place])
        times, of = sum(precise[place::size]), len(precise[place::size])
        kinds = (
            in_branch(partial(run, precise=True), times, of),
            in_branch(partial(run, precise=False), of - times, of),
        )
        return jax.lax.cond(kept, *kinds, *arguments)


def _flags(
    kinds: Sequence[bool], size: int, groups: int, start: jax.Array | int
) -> list[Any]:
    """Return of each place its layers' kinds [groups]; None where they are alike."""
    orders = [kinds[place::size] for place in range(size)]
    flags = [jnp.asarray(own) if len({*own}) > 1 else None for own in orders]
    if len(orders[0]) == groups:
        return flags
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start)
    return jax.tree.map(lambda own: cut(own, slice_size=groups), flags)


def _cut(size: int, stacked: jax.Array) -> jax.Array:
    return stacked.reshape(-1, size, *stacked.shape[1:])


def _each(params: Any, size: int) -> list[Any]:
    """Return the layers of one kind in a group, one by one."""
    if size == 1:
        return [params]
    leaves, tree = jax.tree.flatten(params)
    return [tree.unflatten(own) for own in zip(*map(jnp.unstack, leaves), strict=True)]
