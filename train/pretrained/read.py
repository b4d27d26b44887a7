"""Read the weights in a folder that transformers or `train.export` wrote.

Each process reads only the rows and columns of each tensor that its devices hold.
"""

import inspect
import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial

import jax
import numpy as np

from model.params import named
from train.core.program import Program
from train.core.state import TrainState
from train.pretrained.compare import Folder, modules_not_read, tensors_of_folder
from train.pretrained.family import Family
from train.pretrained.folder_family import family_of_folder
from train.pretrained.tensors import FamilyTensors
from train.resolve.program import ConfiguredProgram

_Span = tuple[int, int]  # start and stop along a dim


def read_folder(path: str, program: ConfiguredProgram) -> TrainState:
    """Return the state of step 0 with the weights of a folder, without an average.

    Only parameters with rows that the folder lacks are initialised, so that memory
    holds little more than the weights.

    Raises:
        DataError: with the name of a missing or damaged file.
    """
    family = family_of_folder(path, program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        tensors = tensors_of_folder(folder, family, program)
        if jax.process_index() == 0:
            _say_what_is_not_read(folder, family, program)
        abstract = dict(named(program.state.params))
        num_rows = {name: tensors.num_vocab_rows(abstract, name) for name in abstract}
        larger = {name for name, n in num_rows.items() if n > tensors.vocab_size}
        state = _initial_state(program, larger)
        reader = _Reader(folder, tensors, abstract)
        leaves = [reader.param(name, state.params.get(name)) for name in abstract]
    params = jax.tree.unflatten(jax.tree.structure(program.state.params), leaves)
    return state._replace(params=params)


def _say_what_is_not_read(
    folder: Folder, family: Family, program: ConfiguredProgram
) -> None:
    """Print a line for each kind of tensors, and each file, that are not read."""
    if num_unread := len(modules_not_read(folder, family, program.config.model)):
        print(
            f"weights     {num_unread:,} tensors of prediction modules are not read, "
            f"because model.predict_ahead=0",
            flush=True,
        )
    for what, count in folder.not_read.items():
        number = f"{count:,} tensors" if count else "the weights"
        print(f"weights     {number} {what} are not read", flush=True)


def _initial_state(program: Program, names: Collection[str]) -> TrainState:
    """Return the initial state, with `params` as a flat dict of only these names."""

    def select(state: TrainState) -> TrainState:
        params = {name: x for name, x in named(state.params) if name in names}
        optimizer = state.optimizer._replace(average=None)
        return state._replace(params=params, optimizer=optimizer)

    init = inspect.unwrap(program.init)
    return jax.jit(lambda: select(init()), out_shardings=select(program.shardings))()


class _Reader:
    """Reads parameters from the tensors of a folder."""

    def __init__(
        self,
        folder: Folder,
        tensors: FamilyTensors,
        abstract: dict[str, jax.ShapeDtypeStruct],
    ):
        self._folder = folder
        self._tensors = tensors
        self._abstract = abstract
        copies = tensors.copies
        self._tensor_of = {
            (param, tensor.stack_index): (name, tensor)
            for name, tensor in tensors.tensors.items()
            if name not in copies
            for param in tensor.params
        }

    def param(self, name: str, initial: jax.Array | None) -> jax.Array:
        """Return a parameter with the sharding and dtype of the program.

        Rows that the folder lacks keep their values in `initial`.
        """
        like = self._abstract[name]
        shards = dict[tuple[_Span, ...], jax.Array]()
        initial_shards = initial.addressable_shards if initial is not None else ()
        initial_of = {_spans(x.index, like.shape): x.data for x in initial_shards}
        assert like.sharding is not None
        indices = like.sharding.addressable_devices_indices_map(like.shape)
        arrays = []
        for device, index in indices.items():
            spans = _spans(index or (), like.shape)
            if spans not in shards:
                shard = np.empty([stop - start for start, stop in spans], like.dtype)
                if initial_of:
                    shard[...] = initial_of[spans]
                self._fill(shard, name, spans)
                shards[spans] = jax.device_put(shard, device)
            arrays.append(jax.device_put(shards[spans], device))
        return jax.make_array_from_single_device_arrays(
            like.shape, like.sharding, arrays
        )

    def _fill(self, shard: np.ndarray, name: str, spans: tuple[_Span, ...]) -> None:
        """Read the spans of a parameter into `shard`, except rows not in the folder."""
        info = self._tensors.infos[name]
        num_stacked = info.stack_dims  # layers and experts
        inner_spans = [*spans[num_stacked:]]
        if "vocab" in info.axes:
            dim = info.axes.index("vocab")
            start, stop = inner_spans[dim]
            stop = min(stop, self._tensors.vocab_size)
            if stop <= start:
                return
            inner_spans[dim] = start, stop
        target = tuple(slice(0, stop - start) for start, stop in inner_spans)
        for local_index in np.ndindex(shard.shape[:num_stacked]):
            index = tuple(spans[dim][0] + i for dim, i in enumerate(local_index))
            shard[local_index][target] = self._read(name, index, inner_spans)

    def _read(
        self, name: str, index: tuple[int, ...], spans: Sequence[_Span]
    ) -> np.ndarray:
        """Return the given spans of one layer's or expert's parameter."""
        size = self._abstract[name].shape[-1]
        order = self._tensors.rope_order(name, size)
        if order is None:
            return self._read_as_stored(name, index, spans)
        whole_heads = [*spans[:-1], (0, size)]
        stored = self._read_as_stored(name, index, whole_heads)
        return stored[..., order[slice(*spans[-1])]]

    def _read_as_stored(
        self, name: str, index: tuple[int, ...], spans: Sequence[_Span]
    ) -> np.ndarray:
        """Return the given spans, with the outputs of each head as they are stored."""
        num_stacked = len(index)
        holds_all = (name, index) not in self._tensor_of
        experts = [slice(e, e + 1) for e in index[1:]] if holds_all else []
        tensor_index = index[: num_stacked - len(experts)]
        stored, (_, siblings, groups) = self._tensor_of[name, tensor_index]
        dims = self._abstract[name].shape[num_stacked:]
        num_inputs = self._tensors.num_input_dims(name)
        rows, in_shape, in_slices = _flatten(spans[:num_inputs], dims[:num_inputs])
        columns, out_shape, out_slices = _flatten(spans[num_inputs:], dims[num_inputs:])
        shape = in_shape + out_shape
        slices = (*in_slices, *out_slices)
        inputs = [rows] if num_inputs else []
        read = partial(self._read_columns, name, stored, inputs=inputs, experts=experts)
        number = siblings.index(name)
        first_output = num_stacked + num_inputs
        shapes = [self._abstract[sibling].shape[first_output:] for sibling in siblings]
        sizes = [*map(math.prod, shapes)]
        groups = sizes[number] if holds_all else groups
        width = sizes[number] // groups
        offset = sum(sizes[:number]) // groups
        group_size = sum(sizes) // groups
        # Groups from first to stop have these columns.
        first = columns.start // width
        stop = -(-columns.stop // width)
        inner = slice(columns.start - first * width, columns.stop - first * width)
        if stop - first == 1:  # no other parameter lies between these columns
            first_column = first * group_size + offset
            x = read(slice(first_column + inner.start, first_column + inner.stop))
        else:
            x = read(slice(first * group_size, stop * group_size))
            rows_shape = x.shape[:-1]
            x = x.reshape((*rows_shape, stop - first, group_size))
            x = x[..., offset : offset + width]
            x = x.reshape((*rows_shape, -1))[..., inner]
        return x.reshape(shape)[slices]

    def _read_columns(
        self,
        name: str,
        stored: str,
        columns: slice,
        *,
        inputs: list[slice],
        experts: list[slice],
    ) -> np.ndarray:
        """Return outputs of a stored tensor, which are the last dim of the result."""
        if num_taps := self._tensors.num_taps(name):
            channels = slice(columns.start // num_taps, columns.stop // num_taps)
            return self._folder.read(stored, [channels]).reshape(-1)
        if inputs and not experts and self._tensors.is_transposed(name):
            return self._folder.read(stored, [columns, *inputs]).T
        return self._folder.read(stored, [*experts, *inputs, columns])


def _spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[_Span, ...]:
    pairs = zip(index, shape, strict=True)
    return tuple(dim_slice.indices(size)[:2] for dim_slice, size in pairs)


def _flatten(
    spans: Sequence[_Span], dims: Sequence[int]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
    """Return the slice of the flattened dims that covers the spans.

    Also return the slice's shape before flattening, and the spans within that shape.
    """
    inner_size = math.prod(dims[1:])
    if all(span == (0, dim) for span, dim in zip(spans[1:], dims[1:], strict=True)):
        start, stop = spans[0] if spans else (0, 1)
        shape = (stop - start, *dims[1:]) if spans else ()
        flat_slice = slice(start * inner_size, stop * inner_size)
        return flat_slice, shape, (slice(None),) * len(dims)
    slices = tuple(slice(*span) for span in spans)
    return slice(0, math.prod(dims)), tuple(dims), slices
