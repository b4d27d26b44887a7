"""The tensors of a folder, and the parameters of ours that they are made of."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from model.config import ModelConfig
from model.params import Kind, ParamInfo, is_info, named
from train.pretrained.families import Family


class Tensor(NamedTuple):
    """A tensor of a folder.

    at: where in the leading dims of a parameter: (layer, expert), (layer,) or (); of
        experts without the second it holds all.
    params: names of the parameters that lie in it side by side, along their outputs.
    """

    at: tuple[int, ...]
    params: list[str]


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
            name.format(*index): Tensor(index, params)
            for name, params in family.tensors().items()
            if all(self._present(param) for param in params)
            for index in itertools.product(*leading[: name.count("{}")])
        }
        self._gathered = jax.jit(self._gather, static_argnums=2)  # once a kind
        written = {param for tensor in self.tensors.values() for param in tensor.params}
        assert written >= self.infos.keys(), self.infos.keys() - written

    def _present(self, name: str) -> bool:
        """Tell whether there is such a parameter, or a bias that is zero."""
        zero = self.family.zeros and name.endswith(".bias")
        return name in self.infos or zero

    def read(self, params: dict[str, jax.Array], name: str) -> np.ndarray:
        """Bring a tensor to this machine's memory; all processes must."""
        index, names = self.tensors[name]
        return np.asarray(self._gathered(params, index, tuple(names)))

    def shapes(self, params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name; nothing is read."""
        first = {tuple(tensor.params): name for name, tensor in self.tensors.items()}
        shapes = jax.eval_shape(
            lambda p: {tensor: self.make(p, name) for tensor, name in first.items()},
            params,
        )
        tensors = self.tensors.items()
        return {name: shapes[tuple(tensor.params)].shape for name, tensor in tensors}

    def make(self, params: dict[str, jax.Array], name: str) -> jax.Array:
        """Make a tensor of parameters."""
        index, names = self.tensors[name]
        return self._made(params, index, tuple(names))

    def _gather(self, *arguments: Any) -> jax.Array:
        array = self._made(*arguments)
        if jax.process_count() == 1:
            return array
        return jax.lax.with_sharding_constraint(array, PartitionSpec())

    def _made(
        self,
        params: dict[str, jax.Array],
        index: tuple[int, ...],
        names: tuple[str, ...],
    ) -> jax.Array:
        arrays = [self._flat(params, param, index) for param in names]
        if self.together(names[0], index):
            return jnp.stack(arrays, -1).reshape(*arrays[0].shape[:-1], -1)
        joined = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
        return joined.T if self.turned(names[0]) else joined

    def rows(self, params: Mapping[str, Any], name: str) -> int:
        """Return how many tokens a parameter has a row, or a column, of; mostly 0."""
        axes = self.infos[name].axes
        return params[name].shape[axes.index("vocab")] if "vocab" in axes else 0

    def together(self, name: str, index: tuple[int, ...]) -> bool:
        """Return whether a parameter's tensor at that place holds those of all experts.

        What lies in it side by side takes turns, and its outputs are the last dim.
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
        """Return a parameter as [inputs, outputs], [rows, D] or [size].

        All experts' have a dim in front.
        """
        if name not in params:
            like = name.removesuffix("bias")
            like += "scale" if like + "scale" in params else "weight"
            return jnp.zeros(self._flat(params, like, index).shape[-1:])
        x, info = params[name][index], self.infos[name]
        axes = info.axes[len(index) :]
        if "vocab" in axes:
            x = jax.lax.slice_in_dim(x, 0, self.vocab_size, axis=axes.index("vocab"))
        lead, inputs = max(0, info.stack - len(index)), self.inputs(name)
        rows = [math.prod(x.shape[lead:][:inputs])] if inputs else []
        outputs = math.prod(x.shape[lead + inputs :])
        return x.reshape(*x.shape[:lead], *rows, outputs)
