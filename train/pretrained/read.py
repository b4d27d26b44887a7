"""Read the weights in a folder that transformers or `train.export` wrote.

Each process reads only the rows and columns of each tensor that its devices hold.
"""

import inspect
import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack

import jax
import numpy as np

from model.params import named
from train.pretrained.compare import Folder, parts_of_folder
from train.pretrained.families import family_of
from train.pretrained.tensors import Parts
from train.program import Program
from train.state import TrainState

_Span = tuple[int, int]  # [first, end)


def read_folder(path: str, program: Program) -> TrainState:
    """Return the state of step 0 with the weights of a folder, without an average.

    Only parameters with rows that the folder lacks are initialised randomly, so memory
    holds little more than the weights.

    Raises:
        DataError: with the name of a missing or damaged file.
    """
    family = family_of(program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        parts = parts_of_folder(folder, family, program)
        abstract = dict(named(program.state.params))
        padded = {n for n in abstract if parts.rows(abstract, n) > parts.vocab_size}
        state = _initial_state(program, padded)
        reader = _Reader(folder, parts, abstract)
        leaves = [reader.param(name, state.params.get(name)) for name in abstract]
    params = jax.tree.unflatten(jax.tree.structure(program.state.params), leaves)
    return state._replace(params=params)


def _initial_state(program: Program, names: Collection[str]) -> TrainState:
    """Return the initial state with only the named parameters, as a dict by name."""

    def select(state: TrainState) -> TrainState:
        params = {name: x for name, x in named(state.params) if name in names}
        optimizer = state.optimizer._replace(average=None)
        return state._replace(params=params, optimizer=optimizer)

    init = inspect.unwrap(program.init)
    return jax.jit(lambda: select(init()), out_shardings=select(program.shardings))()


class _Reader:
    """Reads parameters from the tensors of a folder."""

    def __init__(
        self, folder: Folder, parts: Parts, abstract: dict[str, jax.ShapeDtypeStruct]
    ):
        self.folder, self.parts, self.infos = folder, parts, parts.infos
        self.abstract = abstract
        self.tensors = {
            (param, tensor.stack_index): (name, tensor.params)
            for name, tensor in parts.tensors.items()
            for param in tensor.params
        }

    def param(self, name: str, initial: jax.Array | None) -> jax.Array:
        """Return a parameter with the sharding and dtype of the program.

        Rows that the folder lacks keep their values in `initial`.
        """
        like, read_spans = self.abstract[name], dict[tuple[_Span, ...], jax.Array]()
        shards = initial.addressable_shards if initial is not None else ()
        local_shards = {_span(shard.index, like.shape): shard.data for shard in shards}
        assert like.sharding is not None
        places, arrays = like.sharding.addressable_devices_indices_map(like.shape), []
        for device, index in places.items():
            spans = _span(index or (), like.shape)
            if spans not in read_spans:
                part = np.empty([last - first for first, last in spans], like.dtype)
                if local_shards:
                    part[...] = local_shards[spans]
                self._fill(part, name, spans)
                read_spans[spans] = jax.device_put(part, device)
            arrays.append(jax.device_put(read_spans[spans], device))
        return jax.make_array_from_single_device_arrays(
            like.shape, like.sharding, arrays
        )

    def _fill(self, part: np.ndarray, name: str, spans: tuple[_Span, ...]) -> None:
        """Read the spans of a parameter into `part`, except rows not in the folder."""
        info = self.infos[name]
        lead = info.stack_dims  # layers and experts
        inside = [*spans[lead:]]
        if "vocab" in info.axes:
            dim = info.axes.index("vocab")
            first, last = inside[dim]
            last = min(last, self.parts.vocab_size)
            if last <= first:
                return
            inside[dim] = first, last
        target = tuple(slice(0, last - first) for first, last in inside)
        for local in np.ndindex(part.shape[:lead]):
            index = tuple(spans[dim][0] + i for dim, i in enumerate(local))
            part[local][target] = self._read(name, index, inside)

    def _read(
        self, name: str, index: tuple[int, ...], spans: Sequence[_Span]
    ) -> np.ndarray:
        """Return the given spans of one layer's or expert's parameter."""
        lead, all_experts = len(index), (name, index) not in self.tensors
        experts = [slice(e, e + 1) for e in index[1:]] if all_experts else []
        tensor, siblings = self.tensors[name, index[: lead - len(experts)]]
        dims = self.abstract[name].shape[lead:]
        inputs = self.parts.inputs(name)
        rows, shape_in, cut_in = _flat(spans[:inputs], dims[:inputs])
        columns, shape_out, cut_out = _flat(spans[inputs:], dims[inputs:])
        earlier = siblings[: siblings.index(name)]
        if all_experts:
            stride = len(siblings)
            columns = slice(stride * columns.start, stride * columns.stop)
            places = [*experts, rows, columns] if inputs else [*experts, columns]
            x = self.folder.read(tensor, places)[..., len(earlier) :: stride]
            return x.reshape(shape_in + shape_out)[(*cut_in, *cut_out)]
        shapes = [self.abstract[sibling].shape[lead + inputs :] for sibling in earlier]
        skipped = sum(map(math.prod, shapes))
        columns = slice(columns.start + skipped, columns.stop + skipped)
        if not inputs:
            x = self.folder.read(tensor, [columns])
        elif self.parts.transposed(name):
            x = self.folder.read(tensor, [columns, rows]).T
        else:
            x = self.folder.read(tensor, [rows, columns])
        return x.reshape(shape_in + shape_out)[(*cut_in, *cut_out)]


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[_Span, ...]:
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def _flat(
    spans: Sequence[_Span], dims: Sequence[int]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
    """Return the slice of flattened dims to read, its shape, and slices within it."""
    columns = math.prod(dims[1:])
    if all(span == (0, dim) for span, dim in zip(spans[1:], dims[1:], strict=True)):
        first, last = spans[0] if spans else (0, 1)
        shape = (last - first, *dims[1:]) if spans else ()
        return slice(first * columns, last * columns), shape, (slice(None),) * len(dims)
    cut = tuple(slice(*span) for span in spans)
    return slice(0, math.prod(dims)), tuple(dims), cut
