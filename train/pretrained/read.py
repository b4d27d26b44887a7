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
        DataError: a file is missing or damaged; it is named.
    """
    family = family_of(program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        parts = parts_of_folder(folder, family, program)
        likes = dict(named(program.state.params))
        lacking = {name for name in likes if parts.rows(likes, name) > parts.vocab_size}
        state = _drawn(program, lacking)
        reader = _Reader(folder, parts, likes)
        leaves = [reader.param(name, state.params.get(name)) for name in likes]
    params = jax.tree.unflatten(jax.tree.structure(program.state.params), leaves)
    return state._replace(params=params)


def _drawn(program: Program, names: Collection[str]) -> TrainState:
    """Return the state of step 0 with only the named parameters, by name."""

    def select(state: TrainState) -> TrainState:
        params = {name: x for name, x in named(state.params) if name in names}
        optimizer = state.optimizer._replace(average=None)
        return state._replace(params=params, optimizer=optimizer)

    draw = inspect.unwrap(program.init)
    return jax.jit(lambda: select(draw()), out_shardings=select(program.shardings))()


class _Reader:
    """Reads parameters from the tensors of a folder."""

    def __init__(
        self, folder: Folder, parts: Parts, likes: dict[str, jax.ShapeDtypeStruct]
    ):
        self.folder, self.parts, self.infos = folder, parts, parts.infos
        self.likes = likes
        self.tensors = {
            (param, tensor.at): (name, tensor.params)
            for name, tensor in parts.tensors.items()
            for param in tensor.params
        }

    def param(self, name: str, drawn: jax.Array | None) -> jax.Array:
        """Return a parameter with the sharding and dtype of the program.

        Rows that the folder lacks keep their values in `drawn`.
        """
        like, read_spans = self.likes[name], dict[tuple[_Span, ...], jax.Array]()
        shards = drawn.addressable_shards if drawn is not None else ()
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
        """Fill the spans of a parameter, except for rows that the folder lacks."""
        info = self.infos[name]
        lead, inside = info.stack, [*spans[info.stack :]]  # after layers and experts
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
        """Read the spans of a parameter of one layer or expert."""
        lead, together = len(index), (name, index) not in self.tensors
        experts = [slice(e, e + 1) for e in index[1:]] if together else []
        tensor, siblings = self.tensors[name, index[: lead - len(experts)]]
        dims = self.likes[name].shape[lead:]
        inputs = self.parts.inputs(name)
        rows, shape_in, cut_in = _flat(spans[:inputs], dims[:inputs])
        columns, shape_out, cut_out = _flat(spans[inputs:], dims[inputs:])
        earlier = siblings[: siblings.index(name)]
        if together:
            turns = len(siblings)
            columns = slice(turns * columns.start, turns * columns.stop)
            places = [*experts, rows, columns] if inputs else [*experts, columns]
            x = self.folder.read(tensor, places)[..., len(earlier) :: turns]
            return x.reshape(shape_in + shape_out)[(*cut_in, *cut_out)]
        skipped = sum(math.prod(self.likes[b].shape[lead:][inputs:]) for b in earlier)
        columns = slice(columns.start + skipped, columns.stop + skipped)
        if not inputs:
            x = self.folder.read(tensor, [columns])
        elif self.parts.turned(name):
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
    """Return the slice of flattened dims to read, its shape, and slices of that."""
    columns = math.prod(dims[1:])
    if all(span == (0, dim) for span, dim in zip(spans[1:], dims[1:], strict=True)):
        first, last = spans[0] if spans else (0, 1)
        shape = (last - first, *dims[1:]) if spans else ()
        return slice(first * columns, last * columns), shape, (slice(None),) * len(dims)
    cut = tuple(slice(*span) for span in spans)
    return slice(0, math.prod(dims)), tuple(dims), cut
