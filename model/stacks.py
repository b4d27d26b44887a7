"""Stacks of layers, run by one scan.

Shapes: B batch, T time, D embed, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model.attention.cache import KeysValues
from model.block import Block
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.experts.router import Routing
from model.remat import name_layer_input, rematerialized
from model.taps import LayerFigures, Taps


class LayerKinds(NamedTuple):
    """The kinds of the layers of one loop, in the order in which layers run.

    A query of a local layer sees only the window. A high-precision layer does not
    quantize. In a pipeline, `local_flags` lists the layers of one stage, and
    `high_precision_flags` lists the layers of all stages.
    """

    local_flags: Sequence[bool]
    high_precision_flags: Sequence[bool]


class _Layer(NamedTuple):
    """The inputs of one layer that differ between the layers of a scan.

    `number` is folded into random keys. A flag is None if it is the same for all layers
    in the slot, because it is then static.
    """

    number: jax.Array | None
    params: Any
    cache: KeysValues | None
    local_flag: jax.Array | None
    high_precision_flag: jax.Array | None


class _Outputs(NamedTuple):
    cache: KeysValues | None
    routing: Routing | None
    figures: LayerFigures | None


def make_stack(config: ModelConfig, depth: int, is_moe: bool, rngs: nnx.Rngs) -> Block:
    """Return a block whose parameters are those of `depth` layers, stacked."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, is_moe, rngs)

    return stack(rngs)


def depth_of(stack: Block) -> int:
    """Return the number of layers in a stack."""
    return stack.attention.query.weight.shape[0]


def groups_of(stacks: Sequence[Block]) -> tuple[int, list[int]]:
    """Return the number of groups, and the number of layers of each stack in a group.

    A group ends with one layer of the last stack.
    """
    groups = depth_of(stacks[-1])
    return groups, [depth_of(stack) // groups for stack in stacks]


def run_stacks(
    stacks: Sequence[Block],
    x_BTD: Float[Array, "B T D"],
    execution: Execution,
    call: CallContext,
    *,
    kinds: LayerKinds,
    unroll: int,
    caches: Sequence[KeysValues] | None = None,
    first_layer: jax.Array | int = 0,
) -> tuple[Float[Array, "B T D"], tuple[KeysValues, ...] | None, Routing | None]:
    """Run stacked layers by one scan over groups of layers.

    Each group has layers of all stacks. A slot is a position in the group. If all
    layers in a slot have the same kind, their kind is static. `unroll` is the number of
    layers in each iteration, rounded to whole groups; -1 means all layers, without a
    loop. `caches` has one cache for each slot. Layers are numbered from `first_layer`.

    Returns:
        x_BTD after all layers, the updated caches or None, the last stack's routing.
    """
    num_groups, sizes = groups_of(stacks)
    size = sum(sizes)
    depth = num_groups * size
    graphs, params = zip(*map(nnx.split, stacks), strict=True)
    unroll = num_groups if unroll == -1 else min(max(unroll // size, 1), num_groups)
    group = _Group(
        blocks=[
            graph for graph, n in zip(graphs, sizes, strict=True) for _ in range(n)
        ],
        sizes=sizes,
        execution=execution,
        call=call,
        kinds=kinds,
        # Only a loop over single layers prevents XLA from undoing the recomputation.
        in_loop=unroll < num_groups and size == 1,
    )
    layer_numbers = [first_layer + jnp.arange(i, depth, size) for i in range(size)]
    stacked_params = [
        tree if n == 1 else jax.tree.map(partial(_split_groups, n), tree)
        for tree, n in zip(params, sizes, strict=True)
    ]
    with jax.named_scope("layers"):
        x_BTD, outputs = jax.lax.scan(
            group,
            x_BTD,
            (
                [None] * size if call.keys_BT is None else layer_numbers,
                stacked_params,
                caches or [None] * size,
                _flags_by_slot(kinds.local_flags, size, num_groups, 0),
                _flags_by_slot(
                    kinds.high_precision_flags, size, num_groups, first_layer // size
                ),
            ),
            unroll=True if unroll == num_groups else unroll,
        )
    updated_caches, routings, figures = zip(*outputs, strict=True)
    if call.taps is not None:
        call.taps.add_stack(
            jax.tree.map(lambda *slots: jnp.stack(slots, 1).ravel(), *figures)
        )
    return x_BTD, updated_caches if caches else None, routings[-1]


@dataclass(frozen=True, eq=False)
class _Group:
    """The body of the scan, which runs one layer in each slot of a group.

    `blocks` are the layers without parameters, and `sizes` are the numbers of layers
    that each stack has in a group. `in_loop`: a loop runs groups of a single layer.
    """

    blocks: Sequence[Any]
    sizes: Sequence[int]
    execution: Execution
    call: CallContext
    kinds: LayerKinds
    in_loop: bool

    def __call__(self, x_BTD: Float[Array, "B T D"], inputs):
        numbers, stacked_params, *other_inputs = inputs
        pairs = zip(stacked_params, self.sizes, strict=True)
        params = [layer for stack, n in pairs for layer in _unstack(stack, n)]
        outputs = list[_Outputs]()
        layers = map(_Layer, numbers, params, *other_inputs)
        for slot, layer in enumerate(layers):
            run = rematerialized(
                partial(self._run_layer, slot),
                self.execution.remat,
                self.execution.offload,
                in_loop=self.in_loop,
                branches=layer.high_precision_flag is not None,
            )
            x_BTD, output = run(x_BTD, layer)
            outputs.append(output)
        return x_BTD, outputs

    def _run_layer(self, slot: int, x_BTD: Float[Array, "B T D"], layer: _Layer):
        local_flags, precision_flags = self.kinds
        call = self.call if layer.number is None else self.call.fold_in(layer.number)
        local_flag = local_flags[slot] if layer.local_flag is None else layer.local_flag

        def run(x_BTD: Float[Array, "B T D"], params, cache, high_precision: bool):
            taps = None if call.taps is None else Taps(exact=high_precision)
            x_BTD, cache, routing = nnx.merge(self.blocks[slot], params)(
                x_BTD,
                self.execution,
                call._replace(taps=taps, high_precision=high_precision),
                cache=cache,
                local_flag=local_flag,
            )
            return x_BTD, _Outputs(cache, routing, taps and taps.layer_figures())

        arguments = name_layer_input(x_BTD), layer.params, layer.cache
        if layer.high_precision_flag is None:
            return run(*arguments, high_precision=precision_flags[slot])
        return jax.lax.cond(
            layer.high_precision_flag,
            partial(run, high_precision=True),
            partial(run, high_precision=False),
            *arguments,
        )


def _flags_by_slot(
    flags: Sequence[bool], size: int, num_groups: int, start: jax.Array | int
) -> list[Any]:
    """Return each slot's flags [groups], or None for a slot whose flags are all equal.

    In a pipeline, `flags` may list all stages. This stage's groups begin at `start`.
    """
    by_slot = [flags[slot::size] for slot in range(size)]
    arrays = [jnp.asarray(f) if len({*f}) > 1 else None for f in by_slot]
    if len(by_slot[0]) == num_groups:
        return arrays
    return jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, start, num_groups), arrays
    )


def _split_groups(size: int, stacked: jax.Array) -> jax.Array:
    return stacked.reshape(-1, size, *stacked.shape[1:])


def _unstack(params: Any, size: int) -> list[Any]:
    """Return the parameters of each layer of one stack in a group."""
    if size == 1:
        return [params]
    leaves, tree = jax.tree.flatten(params)
    return [
        tree.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)
    ]
