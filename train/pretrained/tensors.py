"""The tensors in a folder of weights, and the parameters that make up each tensor."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from model.config import ModelConfig
from model.params import Kind, ParamInfo, is_info, named
from model.parts.delta.kind import GATED_DELTA
from train.pretrained.family import Family

# The ends of names of parameters that are written in float32.
_PRECISE = (".router.balance", ".A_log", ".dt_bias")


class Tensor(NamedTuple):
    """A tensor of a folder.

    stack_index: (repeat, expert), (repeat,) or (); indexes a parameter's leading dims.
        A tensor of experts with the index (repeat,) holds all experts.
    params: the names of the parameters that are concatenated along their outputs.
    groups: the number of equal parts into which the outputs of each parameter are cut.
        The tensor has part 0 of each parameter, then part 1 of each, and so on.
    """

    stack_index: tuple[int, ...]
    params: tuple[str, ...]
    groups: int = 1


class FamilyTensors:
    """The tensors of a model in a family's format, made from its parameters."""

    def __init__(self, family: Family, model: ModelConfig, infos: Any, vocab_size: int):
        """Collect the tensors of a model.

        Args:
            family: the family of the model.
            model: the config of the model.
            infos: the tree of `ParamInfo`.
            vocab_size: the number of tokens; padded vocabulary rows are left out.
        """
        self.family = family
        self.vocab_size = vocab_size
        self._rope_dim = model.rope_head_dim
        self._mixers = model.mixers
        self._key_heads = model.delta_sizes.key_heads
        self._conv_width = model.delta_conv_width
        self.infos: dict[str, ParamInfo] = dict(named(infos, is_info))
        self._locations = {
            layer: (name.split(".")[:3], repeat)
            for name, info in self.infos.items()
            for repeat, layer in enumerate(info.layers)
        }
        self.tensors = {
            name: tensor
            for name, tensor in self._family_tensors(model)
            if all(self._is_written(param) for param in tensor.params)
        }
        self._jitted_make = jax.jit(self._make, static_argnums=(2, 3))
        written = {param for tensor in self.tensors.values() for param in tensor.params}
        assert written >= self.infos.keys(), self.infos.keys() - written

    def _family_tensors(self, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the family, also those that the model may lack."""
        layers = range(model.num_layers)
        experts = range(model.num_experts)
        for name, params in self.family.tensors().items():
            for index in itertools.product(*(layers, experts)[: name.count("{}")]):
                if tensor := self._locate(name, params, index):
                    yield name.format(*index), tensor
        for k in range(model.predict_ahead):
            for name, params in self.family.module_tensors().items():
                module = f"predict_ahead.{k}"
                params = tuple(p.replace("predict_ahead", module) for p in params)
                is_expert = "{}" in name
                for expert in experts if is_expert else range(1):
                    full_name = name.format(expert, layer=model.num_layers + k)
                    yield full_name, Tensor((expert,) * is_expert, params)

    @property
    def copies(self) -> dict[str, str]:
        """The tensors that repeat an earlier one, with the name of the earlier one."""
        first = dict[Tensor, str]()
        names = {name: first.setdefault(x, name) for name, x in self.tensors.items()}
        return {copy: name for copy, name in names.items() if copy != name}

    def _locate(
        self, name: str, params: Sequence[str], index: tuple[int, ...]
    ) -> Tensor | None:
        """Return the tensor of a layer's parameters, whose names begin with `layers.`.

        `index` is (layer, expert), (layer,) or () for parameters outside of layers. The
        result is None for a tensor of another mixer than the layer's.
        """
        if not index:
            return Tensor((), tuple(params))
        is_delta = self._mixers[index[0]] == GATED_DELTA.name
        if (".self_attn." if is_delta else ".linear_attn.") in name:
            return None
        prefix, repeat = self._locations[index[0]]
        names = (".".join([*prefix, *param.split(".")[1:]]) for param in params)
        groups = self._key_heads if name.endswith(self.family.by_key_head) else 1
        return Tensor((repeat, *index[1:]), tuple(names), groups)

    def _is_written(self, name: str) -> bool:
        """Return whether the model has a parameter, or a zero bias stands for it."""
        if name in self.infos or not name.endswith(self.family.zero_biases):
            return name in self.infos
        return self._sibling(name) in self.infos

    def _sibling(self, name: str) -> str:
        """Return the parameter whose outputs a bias is added to."""
        parent, _ = name.rsplit(".", 1)
        has_scale = f"{parent}.scale" in self.infos
        return f"{parent}.scale" if has_scale else f"{parent}.weight"

    def read(self, params: dict[str, jax.Array], name: str) -> np.ndarray:
        """Return a tensor in host memory; all processes must call this together."""
        array = self._jitted_make(params, *self.tensors[name])
        if array.is_fully_addressable:
            return np.asarray(array)
        return multihost_utils.process_allgather(array, tiled=True)

    def dtype_of(self, name: str, dtype: np.dtype) -> np.dtype:
        """Return the dtype of a written tensor; `dtype` is that of most tensors.

        The router's bias is always float32, because its steps are small. So are the
        decays of a gated delta net, because they act over many positions.
        """
        is_precise = self.tensors[name].params[0].endswith(_PRECISE)
        return np.dtype(np.float32) if is_precise else dtype

    def shapes(self, params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name, without reading arrays."""
        tensor_of = {tensor.params: tensor for tensor in self.tensors.values()}
        shapes = jax.eval_shape(
            lambda p: {
                names: self._make(p, tensor.stack_index, names, tensor.groups)
                for names, tensor in tensor_of.items()
            },
            params,
        )
        return {name: shapes[t.params].shape for name, t in self.tensors.items()}

    def _make(
        self,
        params: dict[str, jax.Array],
        index: tuple[int, ...],
        names: tuple[str, ...],
        groups: int,
    ) -> jax.Array:
        """Return the tensor that the named parameters make up at an index."""
        arrays = [self._flatten(params, param, index) for param in names]
        *inputs, num_outputs = arrays[0].shape
        has_experts = self.holds_all_experts(names[0], index)
        groups = num_outputs if has_experts else groups
        grouped = [x.reshape((*inputs, groups, -1)) for x in arrays]
        joined = jnp.concatenate(grouped, axis=-1).reshape((*inputs, -1))
        if has_experts:
            return joined
        if num_taps := self.num_taps(names[0]):
            return joined.reshape(-1, 1, num_taps)
        return joined.T if self.is_transposed(names[0]) else joined

    def num_taps(self, name: str) -> int:
        """Return the last dim of taps, stored as [channels, 1, taps]; otherwise 0."""
        return self._conv_width if name.endswith("_taps") else 0

    def num_vocab_rows(self, params: Mapping[str, Any], name: str) -> int:
        """Return the size of a parameter's vocabulary dim, or 0 if it has none."""
        axes = self.infos[name].axes
        return params[name].shape[axes.index("vocab")] if "vocab" in axes else 0

    def holds_all_experts(self, name: str, index: tuple[int, ...]) -> bool:
        """Return whether the tensor of a parameter at an index holds all experts.

        The last dim of such a tensor interleaves the outputs of its parameters.
        """
        return name in self.infos and len(index) < self.infos[name].stack_dims

    def is_transposed(self, name: str) -> bool:
        """Return whether a parameter's outputs are the rows of its tensor."""
        is_matrix = name in self.infos and self.infos[name].kind is Kind.matrix
        return name == "head.weight" or (self.family.transposed and is_matrix)

    def rope_order(self, name: str, size: int) -> np.ndarray | None:
        """Return where each of the last dim's outputs lies in a head of its tensor.

        `size` is the size of the last dim. The result is None if the order is the same.
        """
        if not name.endswith(self.family.interleaved):
            return None
        rotated = np.arange(size - self._rope_dim, size)
        return np.concatenate([np.arange(rotated[0]), rotated[::2], rotated[1::2]])

    def num_input_dims(self, name: str) -> int:
        """Return how many dims of one layer's or expert's parameter are inputs."""
        info = self.infos[name]
        return {Kind.matrix: info.inputs, Kind.table: 1, Kind.vector: 0}[info.kind]

    def _flatten(
        self, params: dict[str, jax.Array], name: str, index: tuple[int, ...]
    ) -> jax.Array:
        """Return a parameter as [inputs, outputs], [rows, D] or [size].

        Layers and experts that `index` leaves out are leading dims. A bias that the
        model lacks is zero.
        """
        if name not in params:
            like = self._flatten(params, self._sibling(name), index)
            return jnp.zeros(like.shape[-1:])
        x = params[name][index]
        info = self.infos[name]
        axes = info.axes[len(index) :]
        if "vocab" in axes:
            x = jax.lax.slice_in_dim(x, 0, self.vocab_size, axis=axes.index("vocab"))
        if (order := self.rope_order(name, x.shape[-1])) is not None:
            x = x[..., np.argsort(order)]
        num_stacked = max(0, info.stack_dims - len(index))
        first_output = num_stacked + self.num_input_dims(name)
        shape = x.shape[:num_stacked]
        if first_output > num_stacked:
            shape += (math.prod(x.shape[num_stacked:first_output]),)
        return x.reshape(*shape, math.prod(x.shape[first_output:]))
