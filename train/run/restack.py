"""Convert the states of older checkpoints, whose layers were stacked differently.

The format of a checkpoint is a number in its metadata; without a number, it is 1.

In format 1, the layers are up to three stacks: `dense_layers` (the first layers without
experts), `layers_between` (later layers without experts) and `layers` (all others). In
format 2, `layers` has a stack for each slot of each segment (model/pattern.py).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.params import LAYERS
from model.pattern import kinds_of, segments_of

FORMAT = 2  # the format that is written


def to_format_1(state: Any, model: ModelConfig) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct`, such as a state, in format 1."""

    slots = _slots(model)

    def convert(node: dict[str, Any]) -> dict[str, Any]:
        stacks = dict[str, Any]()
        for name, layers in _stacks(model).items():
            segment, slot = next(p for p in slots if layers[0] in slots[p])
            resize = partial(_with_depth, depth=len(layers))
            stacks[name] = jax.tree.map(resize, node[LAYERS][segment][slot])
        return node | stacks

    return _convert_layers(state, convert)


def from_format_1(state: Any, model: ModelConfig) -> Any:
    """Return a tree of arrays in format 2. The given arrays are deleted or reused.

    Arrays are converted one after another, so that memory holds little more than one of
    them twice.
    """

    def convert(node: dict[str, Any]) -> dict[str, Any]:
        stacks, segments = _stacks(model), dict[str, Any]()
        others = {name: tree for name, tree in node.items() if name not in stacks}
        # Layers without experts may be in two stacks, and one slot may have both.
        without_experts = [name for name in stacks if name != LAYERS]
        for names in filter(None, (without_experts, [LAYERS])):
            order = [layer for name in names for layer in stacks[name]]
            slots = {k: p for k, p in _slots(model).items() if p[0] in order}
            rows = tuple(tuple(map(order.index, p)) for p in slots.values())
            flat = [jax.tree.flatten(node[name]) for name in names]
            leaves, trees = zip(*flat, strict=True)
            parts = [_split(arrays, rows) for arrays in zip(*leaves, strict=True)]
            for (segment, slot), *new in zip(slots, *parts, strict=True):
                segments.setdefault(segment, {})[slot] = trees[0].unflatten(new)
        return others | {LAYERS: segments}

    return _convert_layers(state, convert)


def _convert_layers(tree: Any, convert: Callable[[dict[str, Any]], Any]) -> Any:
    """Convert the parameters, and everything in a state that has their structure."""

    def has_layers(node: Any) -> bool:
        return isinstance(node, dict) and LAYERS in node

    return jax.tree.map(
        lambda node: convert(node) if has_layers(node) else node,
        tree,
        is_leaf=has_layers,
    )


def _stacks(model: ModelConfig) -> dict[str, list[int]]:
    """Return the numbers of the layers in each stack of format 1."""
    stacks = dict[str, list[int]]()
    for layer, kind in enumerate(kinds_of(model)):
        name = LAYERS
        if model.expert_layers and not kind.experts:
            is_early = layer < model.layers_before_experts
            name = "dense_layers" if is_early else "layers_between"
        stacks.setdefault(name, []).append(layer)
    return stacks


def _slots(model: ModelConfig) -> dict[tuple[str, str], range]:
    """Return the numbers of the layers at each slot of each segment."""
    return {
        (str(i), str(slot)): segment.layers(slot)
        for i, segment in enumerate(segments_of(model))
        for slot in range(len(segment.pattern))
    }


def _with_depth(array: jax.ShapeDtypeStruct, depth: int) -> jax.ShapeDtypeStruct:
    return array.update(shape=(depth, *array.shape[1:]))


def _split(arrays: Sequence[jax.Array], rows: tuple[tuple[int, ...], ...]) -> Any:
    """Return an array of each tuple of rows of the concatenated arrays."""
    if len(arrays) == len(rows) == 1:
        return arrays
    parts = jax.block_until_ready(_make_split(rows, arrays[0].sharding)(arrays))
    for array in arrays:
        array.delete()
    return parts


@cache
def _make_split(rows: tuple[tuple[int, ...], ...], sharding: Any) -> Callable[..., Any]:
    def split(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        arrays = jax.device_put(arrays, jax.memory.Space.Device)
        return [jnp.concatenate(arrays)[np.array(own)] for own in rows]

    return jax.jit(split, out_shardings=sharding)
