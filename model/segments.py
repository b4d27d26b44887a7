"""The layers of a segment: make their parameters, and run them by one scan.

Shapes: B batch, T time, D embed, L layers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from model.attention.cache import LayerCache
from model.block import Block
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.model_parts import ModelParts
from model.params import in_layer_order
from model.pattern import BlockKind, Segment, kinds_of
from model.remat import name_layer_input, rematerialized
from model.routing import Routing
from model.taps import LayerFigures


class LayerFlags(NamedTuple):
    """Properties of the layers of a segment that do not change their parameters.

    A query of a local layer sees only the window. A high-precision layer does not
    quantize. In a pipeline, `local` lists the layers of one stage, and `high_precision`
    lists the layers of all stages.
    """

    local: Sequence[bool]
    high_precision: Sequence[bool]


class _Layer(NamedTuple):
    """The inputs of one layer that differ between the layers of a scan.

    `number` is folded into random keys. A flag is None if it is the same for all layers
    at the slot, because it is then static.
    """

    number: jax.Array | None
    params: Any
    cache: LayerCache | None
    local_flag: jax.Array | None
    high_precision_flag: jax.Array | None


class _Outputs(NamedTuple):
    cache: LayerCache | None
    routing: Routing | None
    figures: LayerFigures | None


def draw_layer_keys(config: ModelConfig, rngs: nnx.Rngs) -> Key[Array, "L"]:
    """Return a random key for each layer.

    The keys of the layers of one kind are drawn together. Layers before the first group
    that ends with experts are drawn before later layers of the same kind.
    """
    drawn = dict[tuple[bool, BlockKind], list[int]]()
    for layer, kind in enumerate(kinds_of(config)):
        is_early = layer < config.layers_before_experts
        drawn.setdefault((is_early, kind), []).append(layer)
    keys = [rngs.params.split(len(layers)).key[...] for layers in drawn.values()]
    return jnp.concatenate(keys)[np.argsort([*itertools.chain(*drawn.values())])]


def make_segment(
    config: ModelConfig, segment: Segment, keys_L: Key[Array, "L"], parts: ModelParts
) -> dict[str, Block]:
    """Return a block for each slot ("0", "1", ...), which stacks that slot's layers.

    `keys_L` are the keys of all layers of the model.
    """

    def make_block(kind: BlockKind, key: jax.Array) -> Block:
        return Block(config, kind, nnx.Rngs(key), parts)

    blocks = dict[str, Block]()
    for slot, kind in enumerate(segment.pattern):
        keys = keys_L[np.array(segment.layers(slot))]
        blocks[str(slot)] = nnx.vmap(partial(make_block, kind))(keys)
    return blocks


def num_repeats(blocks: Sequence[Block]) -> int:
    """Return how often stacked blocks repeat their pattern."""
    return len(jax.tree.leaves(nnx.state(blocks[0]))[0])


def run_segment(
    blocks: Sequence[Block],
    x_BTD: Float[Array, "B T D"],
    execution: Execution,
    call: CallContext,
    *,
    flags: LayerFlags,
    unroll: int,
    caches: Sequence[LayerCache] | None = None,
    first_layer: jax.Array | int = 0,
) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...] | None, Routing | None]:
    """Run the layers of a segment, or those of one pipeline stage, by one scan.

    `blocks` has a stacked block for each slot of the pattern, and `caches` has a cache
    for each slot. If all layers at a slot have the same flag, it is static. `unroll`
    is the number of layers in each iteration, rounded to whole patterns; -1 means all
    layers, without a loop. Layers are numbered from `first_layer`.

    Returns:
        x_BTD after all layers, the updated caches or None, and the routing of the
        layers that have experts.
    """
    size = len(blocks)
    repeats = num_repeats(blocks)
    graphs, params = zip(*map(nnx.split, blocks), strict=True)
    unroll = repeats if unroll == -1 else min(max(unroll // size, 1), repeats)
    pattern = _Pattern(
        blocks=graphs,
        execution=execution,
        call=call,
        flags=flags,
        # Only a loop over single layers prevents XLA from undoing the recomputation.
        in_loop=unroll < repeats and size == 1,
    )
    layer_numbers = [
        first_layer + jnp.arange(i, repeats * size, size) for i in range(size)
    ]
    with jax.named_scope("layers"):
        x_BTD, outputs = jax.lax.scan(
            pattern,
            x_BTD,
            (
                [None] * size if call.keys_BT is None else layer_numbers,
                list(params),
                caches or [None] * size,
                _flags_by_slot(flags.local, size, repeats, 0),
                _flags_by_slot(
                    flags.high_precision, size, repeats, first_layer // size
                ),
            ),
            unroll=True if unroll == repeats else unroll,
        )
    updated_caches, routings, figures = zip(*outputs, strict=True)
    if call.taps is not None:
        call.taps.add_segment(in_layer_order(figures))
    routings = [routing for routing in routings if routing is not None]
    routing = in_layer_order(routings) if routings else None
    return x_BTD, updated_caches if caches else None, routing


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The body of the scan, which runs one layer at each slot of the pattern.

    `blocks` are the layers without parameters. `in_loop`: a loop runs single layers.
    """

    blocks: Sequence[Any]
    execution: Execution
    call: CallContext
    flags: LayerFlags
    in_loop: bool

    def __call__(self, x_BTD: Float[Array, "B T D"], inputs):
        outputs = list[_Outputs]()
        for slot, layer in enumerate(map(_Layer, *inputs)):
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
        local, high_precision = self.flags
        call = self.call if layer.number is None else self.call.fold_in(layer.number)
        local_flag = local[slot] if layer.local_flag is None else layer.local_flag

        def run(x_BTD: Float[Array, "B T D"], params, cache, high_precision: bool):
            taps = call.taps and call.taps.empty(exact=high_precision)
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
            return run(*arguments, high_precision=high_precision[slot])
        return jax.lax.cond(
            layer.high_precision_flag,
            partial(run, high_precision=True),
            partial(run, high_precision=False),
            *arguments,
        )


def _flags_by_slot(
    flags: Sequence[bool], size: int, repeats: int, start: jax.Array | int
) -> list[Any]:
    """Return each slot's flags [repeats], or None for a slot whose flags are equal.

    In a pipeline, `flags` may list all stages. This stage's repeats begin at `start`.
    """
    by_slot = [flags[slot::size] for slot in range(size)]
    arrays = [jnp.asarray(f) if len({*f}) > 1 else None for f in by_slot]
    if len(by_slot[0]) == repeats:
        return arrays
    return jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, start, repeats), arrays
    )
