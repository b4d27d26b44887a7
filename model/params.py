"""Metadata of parameters, and the tree of parameters.

After the model is built, parameters are nested dicts of arrays. The parameters of
layers are stacked along a leading `layers` dim. `layers.1.0.mlp.up.weight` has the
layers at slot 0 of the pattern of segment 1 (model/pattern.py). Checkpoints therefore
have the same layout for every unrolling of layers and every pipeline.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model.pattern import segments_of

# The subtree whose parameters have a leading `layers` dim.
LAYERS = "layers"


def is_of_layers(name: str) -> bool:
    """Return whether the array of the state with this dotted name stacks layers."""
    return LAYERS in name.split(".")


class Kind(StrEnum):
    """How optimizers treat a parameter.

    `matrix`: a linear map inside the network. `table`: an embedding or the head,
    indexed by token or position. `vector`: a scale or a bias.
    """

    matrix = "matrix"
    table = "table"
    vector = "vector"


class ParamInfo(NamedTuple):
    """Metadata of a parameter.

    axes: the logical axis of each dim. None is for a dim that is never sharded.
    inputs: the number of contracted dims of a matrix. These dims follow the stack dims.
    padding: the number of padding entries at the end of the `vocab` dim.
    layers: the numbers of the layers that are stacked along the first dim.
    """

    axes: tuple[str | None, ...]
    kind: Kind
    inputs: int = 0
    padding: int = 0
    layers: range = range(0)

    @property
    def stacked(self) -> bool:
        """Whether the first dim indexes layers."""
        return self.axes[0] == LAYERS

    @property
    def stack_dims(self) -> int:
        """The number of leading dims that index layers or experts."""
        axes = self.axes[self.stacked :]
        return self.stacked + (len(axes) > 1 and axes[0] == "experts")

    @property
    def output_start(self) -> int:
        """The index of a matrix's first output dim, or of a table's column dim."""
        return self.stack_dims + max(1, self.inputs)

    def size(self, shape: tuple[int, ...]) -> int:
        """Count the parameters in an array of this shape, without its padding."""
        dims = zip(self.axes, shape, strict=True)
        return math.prod(dim - self.padding * (axis == "vocab") for axis, dim in dims)


def is_info(node: object) -> bool:
    """Return whether a node of a tree of `ParamInfo` is a leaf."""
    return isinstance(node, ParamInfo)


def param_infos(model: Any) -> dict[str, Any]:
    """Return the tree of `ParamInfo` of a GPT, shaped like the tree of parameters."""

    def info_of(path: tuple[Any, ...], param: nnx.Variable) -> ParamInfo:
        info: ParamInfo = param.get_metadata("info")
        if path[0] != LAYERS:
            return info
        segment = segments_of(model.config)[int(path[1])]
        layers = segment.layers(int(path[2]))
        return info._replace(axes=(LAYERS, *info.axes), layers=layers)

    return nnx.to_pure_dict(nnx.map_state(info_of, nnx.state(model, nnx.Param)))


def layer_trees(layers: Mapping[str, Any]) -> list[list[Any]]:
    """Return the trees of a `layers` subtree, by segment and slot in numeric order."""
    return [
        [slots[str(slot)] for slot in range(len(slots))]
        for slots in (layers[str(segment)] for segment in range(len(layers)))
    ]


def in_layer_order(slots: Sequence[Any]) -> Any:
    """Return a tree of a segment's values [L, ...], in the order in which layers run.

    `slots` has a tree of values [repeats, ...] for each slot of the pattern.
    """
    if len(slots) == 1:
        return slots[0]
    return jax.tree.map(
        lambda *values: jnp.stack(values, 1).reshape(-1, *values[0].shape[1:]), *slots
    )


def name_in_layer(path: Sequence[Any]) -> str:
    """Return the name of a leaf's path without its segment and its slot.

    The result depends only on the path inside the layer, not on how layers are grouped.
    """
    path = tuple(path)
    keys = [getattr(entry, "key", None) for entry in path]
    if LAYERS in keys:
        start = keys.index(LAYERS) + 1
        path = path[:start] + path[start + 2 :]
    return jax.tree_util.keystr(path)


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator:
    """Yield the leaves of a tree as ("layers.0.0.mlp.up.weight", leaf) pairs."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf
