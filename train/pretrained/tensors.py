"""The tensors of a folder, and the parameters of ours that they are made of."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from model.config import ModelConfig
from model.params import Kind, ParamInfo, is_info, named
from train.pretrained.families import Family


class Tensor(NamedTuple):
    """A tensor of a folder.

    at: its place in the leading dims of a parameter: (layer, expert), (layer,) or ().
        A tensor of experts without the second holds all of them.
    params: names of the parameters that lie in it side by side, along their outputs.
    """

    at: tuple[int, ...]
    params: tuple[str, ...]


class Parts:
    """The parameters that make up the tensors of a family's model."""

    def __init__(self, family: Family, model: ModelConfig, infos: Any, vocab_size: int):
        """List them.

        Args:
            family: of the model.
            model: its config.
            infos: tree of `ParamInfo`.
            vocab_size: rows of tables that stand for a token; the others are left out.
        """
        self.family, self.vocab_size = family, vocab_size
        self.infos: dict[str, ParamInfo] = dict(named(infos, is_info))
        leading = range(model.num_layers), range(model.num_experts)
        self.tensors = {
            name.format(*index): Tensor(index, tuple(params))
            for name, params in family.tensors().items()
            if all(self._is_written(param) for param in params)
            for index in itertools.product(*leading[: name.count("{}")])
        }
        self._made = jax.jit(self._make, static_argnums=2)  # compiled once a kind
        written = {param for tensor in self.tensors.values() for param in tensor.params}
        assert written >= self.infos.keys(), self.infos.keys() - written

    def _is_written(self, name: str) -> bool:
        zero = self.family.zeros and name.endswith(".bias")
        return name in self.infos or zero

    def read(self, params: dict[str, jax.Array], name: str) -> np.ndarray:
        """Bring a tensor to this machine's memory; all processes must."""
        array = self._made(params, *self.tensors[name])
        if array.is_fully_addressable:
            return np.asarray(array)
        return multihost_utils.process_allgather(array, tiled=True)

    def shapes(self, params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name; nothing is read."""
        index_of = {tensor.params: tensor.at for tensor in self.tensors.values()}
        shapes = jax.eval_shape(
            lambda p: {
                names: self._make(p, at, names) for names, at in index_of.items()
            },
            params,
        )
        return {name: shapes[names].shape for name, (_, names) in self.tensors.items()}

    def _make(
        self,
        params: dict[str, jax.Array],
        index: tuple[int, ...],
        names: tuple[str, ...],
    ) -> jax.Array:
        """Make a tensor of parameters."""
        arrays = [self._flat(params, param, index) for param in names]
        if self.together(names[0], index):
            return jnp.stack(arrays, -1).reshape(*arrays[0].shape[:-1], -1)
        joined = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
        return joined.T if self.turned(names[0]) else joined

    def rows(self, params: Mapping[str, Any], name: str) -> int:
        """Return the number of tokens that a parameter has a row or column of, or 0."""
        axes = self.infos[name].axes
        return params[name].shape[axes.index("vocab")] if "vocab" in axes else 0

    def together(self, name: str, index: tuple[int, ...]) -> bool:
        """Return whether a parameter's tensor at that place holds all experts.

        Parameters that lie in it side by side alternate, and outputs are the last dim.
        """
        return name in self.infos and len(index) < self.infos[name].stack

    def turned(self, name: str) -> bool:
        """Return whether a parameter's outputs are the rows of its tensor."""
        matrix = name in self.infos and self.infos[name].kind is Kind.matrix
        return name == "head.weight" or (self.family.turned and matrix)

    def inputs(self, name: str) -> int:
        """Return how many dims of a parameter of one layer, or expert, are rows."""
        info = self.infos[name]
        return {Kind.matrix: info.inputs, Kind.table: 1, Kind.vector: 0}[info.kind]

    def _flat(
        self, params: dict[str, jax.Array], name: str, index: tuple[int, ...]
    ) -> jax.Array:
        """Return a parameter as [inputs, outputs], [rows, D] or [size], per expert."""
        if name not in params:
            like = name.removesuffix("bias")
            like += "scale" if like + "scale" in params else "weight"
            return jnp.zeros(self._flat(params, like, index).shape[-1:])
        x, info = params[name][index], self.infos[name]
        axes = info.axes[len(index) :]
        if "vocab" in axes:
            x = jax.lax.slice_in_dim(x, 0, self.vocab_size, axis=axes.index("vocab"))
        lead, inputs = max(0, info.stack - len(index)), self.inputs(name)
        shape = x.shape[:lead]
        shape += (math.prod(x.shape[lead:][:inputs]),) if inputs else ()
        return x.reshape(*shape, math.prod(x.shape[lead + inputs :]))
