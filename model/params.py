"""What is known of a parameter besides its value, and the tree of them.

Parameters live in plain nested dicts of arrays once the model is built; the layers'
are stacked along a leading `layers` dim, whatever loop runs over them, so that there is
one checkpoint layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# The subtrees whose parameters carry a leading `layers` dim.
STACKED = ("dense_layers", "layers_between", "layers")


def is_of_layers(name: str) -> bool:
    """Tell whether an array of the state is stacked, a slice of it for each layer."""
    return any(part in STACKED for part in name.split("."))


class Kind(StrEnum):
    """How optimizers see a parameter.

    `matrix`: a linear map inside the network. `table`: an embedding or the head,
    indexed by token or position. `vector`: a scale or a bias.
    """

    matrix = "matrix"
    table = "table"
    vector = "vector"


class ParamInfo(NamedTuple):
    """What is known of a parameter besides its value.

    axes: the logical axis of each dim.
    kind: how optimizers see it.
    inputs: of a matrix, how many dims are contracted, the first of its own.
    padding: how many of the last entries along `vocab` stand for no token.
    """

    axes: tuple[str, ...]
    kind: Kind
    inputs: int = 0
    padding: int = 0

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts layers."""
        return self.axes[0] == "layers"

    @property
    def stack(self) -> int:
        """How many leading dims count layers, and experts that each have their own."""
        own = self.axes[self.stacked :]
        return self.stacked + (len(own) > 1 and own[0] == "experts")

    @property
    def split(self) -> int:
        """The dim that outputs begin with, or a table's columns; vectors have none."""
        return self.stack + max(1, self.inputs)

    def size(self, shape: tuple[int, ...]) -> int:
        """Count the parameters in an array of this shape, without its padding."""
        dims = zip(self.axes, shape, strict=True)
        return math.prod(dim - self.padding * (axis == "vocab") for axis, dim in dims)


def is_info(node: object) -> bool:
    """Return whether a node of a tree of `ParamInfo` is a leaf."""
    return isinstance(node, ParamInfo)


def param_infos(model: nnx.Module) -> dict[str, Any]:
    """Return the tree of `ParamInfo`, shaped like the tree of parameters."""

    def info(path: tuple[Any, ...], param: nnx.Variable) -> ParamInfo:
        own: ParamInfo = param.get_metadata("info")
        if path[0] not in STACKED:
            return own
        return own._replace(axes=("layers", *own.axes))

    return nnx.to_pure_dict(nnx.map_state(info, nnx.state(model, nnx.Param)))


def in_layer_order(stacks: Mapping[str, Float[Array, "_"]]) -> Float[Array, "_"]:
    """Return values of each stack's layers, by its name, in the order of layers."""
    first, between, last = (stacks.get(name) for name in STACKED)
    assert last is not None
    if between is not None:
        groups = between.reshape(last.size, -1), last.reshape(-1, 1)
        last = jnp.concatenate(groups, axis=1).ravel()
    return last if first is None else jnp.concatenate([first, last])


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator:
    """Yield the leaves of a tree as ("layers.mlp.up.weight", leaf) pairs."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf
