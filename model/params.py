"""Metadata of parameters, and the tree of parameters.

After the model is built, parameters are nested dicts of arrays. The parameters of
layers are always stacked along a leading `layers` dim. Checkpoints therefore have the
same layout for every unrolling of layers and every pipeline.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# The subtrees whose parameters have a leading `layers` dim.
STACKED = ("dense_layers", "layers_between", "layers")


def is_of_layers(name: str) -> bool:
    """Return whether the array of the state with this dotted name stacks layers."""
    return any(part in STACKED for part in name.split("."))


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

    axes: the logical axis of each dim.
    inputs: the number of contracted dims of a matrix. These dims follow the stack dims.
    padding: the number of padding entries at the end of the `vocab` dim.
    """

    axes: tuple[str, ...]
    kind: Kind
    inputs: int = 0
    padding: int = 0

    @property
    def stacked(self) -> bool:
        """Whether the first dim indexes layers."""
        return self.axes[0] == "layers"

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


def param_infos(model: nnx.Module) -> dict[str, Any]:
    """Return the tree of `ParamInfo`, shaped like the tree of parameters."""

    def info_of(path: tuple[Any, ...], param: nnx.Variable) -> ParamInfo:
        info: ParamInfo = param.get_metadata("info")
        if path[0] not in STACKED:
            return info
        return info._replace(axes=("layers", *info.axes))

    return nnx.to_pure_dict(nnx.map_state(info_of, nnx.state(model, nnx.Param)))


def in_layer_order(stacks: Mapping[str, Float[Array, "_"]]) -> Float[Array, "_"]:
    """Return one value per layer, in the order in which layers run."""
    dense, between, last = (stacks.get(name) for name in STACKED)
    assert last is not None
    if between is not None:
        groups = between.reshape(last.size, -1), last.reshape(-1, 1)
        last = jnp.concatenate(groups, axis=1).ravel()
    return last if dense is None else jnp.concatenate([dense, last])


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator:
    """Yield the leaves of a tree as ("layers.mlp.up.weight", leaf) pairs."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf
