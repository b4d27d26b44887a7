"""Read the weights in a folder that transformers, or `train.export`, wrote.

Each process reads of each tensor the rows and columns that its own devices hold.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import jax
import numpy as np

from model.params import named
from train.pretrained.compare import Folder, parts_of_folder
from train.pretrained.families import family_of
from train.pretrained.tensors import Parts
from train.program import Program
from train.state import TrainState

_Span = tuple[int, int]  # first, and behind the last


def read_folder(path: str, program: Program, state: TrainState) -> TrainState:
    """Return a drawn state with the weights of a folder, where the drawn ones were.

    Raises:
        DataError: naming a file that is missing or damaged.
    """
    family = family_of(program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        parts = parts_of_folder(folder, family, program)
        reader, drawn = _Reader(folder, parts), dict(named(state.params))
        leaves = [reader.param(drawn, name) for name in drawn]
    params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
    return state._replace(params=params)


class _Reader:
    """Reads parameters out of a folder's tensors."""

    def __init__(self, folder: Folder, parts: Parts):
        self.folder, self.parts, self.infos = folder, parts, parts.infos
        self.tensors = {
            (param, tensor.at): (name, tensor.params)
            for name, tensor in parts.tensors.items()
            for param in tensor.params
        }

    def param(self, params: dict[str, jax.Array], name: str) -> jax.Array:
        """Return a parameter, sharded and of the dtype as it was drawn.

        That one is gone then: memory holds one device's part of it twice at most, or
        where it has rows that the folder lacks, all of it.
        """
        drawn, info = params[name], self.infos[name]
        rows = drawn.shape[info.axes.index("vocab")] if "vocab" in info.axes else 0
        lacks = rows > self.parts.vocab_size
        shapes = {key: x.shape for key, x in params.items()}
        shards = [
            (s.device, _span(s.index, drawn.shape), s.data if lacks else None)
            for s in drawn.addressable_shards
        ]
        if not lacks:
            drawn.delete()
        read, arrays = dict[tuple[_Span, ...], jax.Array](), list[jax.Array]()
        for device, spans, own in shards:
            if spans not in read:
                part = np.empty([last - first for first, last in spans], drawn.dtype)
                if own is not None:
                    part[...] = own
                self._fill(part, name, spans, shapes)
                read[spans] = jax.device_put(part, device)
            arrays.append(jax.device_put(read[spans], device))
        return jax.make_array_from_single_device_arrays(
            drawn.shape, drawn.sharding, arrays
        )

    def _fill(
        self,
        part: np.ndarray,
        name: str,
        spans: tuple[_Span, ...],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Read what spans cut out of a parameter; rows that are not there stay."""
        info = self.infos[name]
        lead, inside = info.stack, [*spans[info.stack :]]  # behind layers and experts
        if "vocab" in info.axes:
            dim = info.axes.index("vocab")
            first, last = inside[dim]
            inside[dim] = (first, max(first, min(last, self.parts.vocab_size)))
        place = tuple(slice(0, last - first) for first, last in inside)
        for local in np.ndindex(part.shape[:lead]):
            at = tuple(i + first for i, (first, _) in zip(local, spans, strict=False))
            part[local][place] = self._read(name, at, inside, shapes)

    def _read(
        self,
        name: str,
        at: tuple[int, ...],
        spans: Sequence[_Span],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> np.ndarray:
        """Read the part of a parameter of one layer, or expert, that spans cut out."""
        lead, together = len(at), (name, at) not in self.tensors
        experts = [slice(e, e + 1) for e in at[1:]] if together else []
        tensor, beside = self.tensors[name, at[: lead - len(experts)]]
        dims = shapes[name][lead:]
        inputs = self.parts.inputs(name)
        rows, shape_in, cut_in = _flat(spans[:inputs], dims[:inputs])
        columns, shape_out, cut_out = _flat(spans[inputs:], dims[inputs:])
        before = beside[: beside.index(name)]
        if together:
            turns, own = len(beside), len(before)
            columns = slice(turns * columns.start, turns * columns.stop)
            x = self.folder.read(tensor, *experts, *[rows] * bool(inputs), columns)
            x = x[..., own::turns]
            return x.reshape(shape_in + shape_out)[(*cut_in, *cut_out)]
        split = [math.prod(shapes[b][lead:][inputs:]) for b in before]
        columns = slice(columns.start + sum(split), columns.stop + sum(split))
        if not inputs:
            x = self.folder.read(tensor, columns)
        elif self.parts.turned(name):
            x = self.folder.read(tensor, columns, rows).T
        else:
            x = self.folder.read(tensor, rows, columns)
        return x.reshape(shape_in + shape_out)[(*cut_in, *cut_out)]


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[_Span, ...]:
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def _flat(
    spans: Sequence[_Span], dims: Sequence[int]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
    """Return what to read of dims laid out as one, its shape, and what to keep."""
    rest = math.prod(dims[1:])
    if all(span == (0, dim) for span, dim in zip(spans[1:], dims[1:], strict=True)):
        first, last = spans[0] if spans else (0, 1)
        shape = (last - first, *dims[1:]) if spans else ()
        return slice(first * rest, last * rest), shape, (slice(None),) * len(dims)
    cut = tuple(slice(*span) for span in spans)
    return slice(0, math.prod(dims)), tuple(dims), cut
