"""Read the weights in a folder that transformers, or `train.export`, wrote.

Each process reads of each tensor the rows and columns that its own devices hold.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

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
    """Return a drawn state with the weights of a folder.

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
        """Return a parameter, sharded and of the dtype as it was drawn."""
        drawn, info = params[name], self.infos[name]
        lead = info.stack  # layers and experts
        # Of rows that the folder lacks the drawn ones stay.
        shards = {_span(s.index, drawn.shape): s for s in drawn.addressable_shards}

        def read(index: Any) -> np.ndarray:
            spans = _span(index, drawn.shape)
            part = np.array(shards[spans].data)
            inside = list(spans[lead:])
            if "vocab" in info.axes:
                dim = info.axes.index("vocab")
                first, last = inside[dim]
                inside[dim] = (first, max(first, min(last, self.parts.vocab_size)))
            shapes = {key: x.shape for key, x in params.items()}
            place = tuple(slice(0, last - first) for first, last in inside)
            for local in np.ndindex(part.shape[:lead]):
                at = tuple(
                    i + first for i, (first, _) in zip(local, spans, strict=False)
                )
                part[local][place] = self._read(name, at, inside, shapes)
            return part

        return jax.make_array_from_callback(drawn.shape, drawn.sharding, read)

    def _read(
        self,
        name: str,
        at: tuple[int, ...],
        spans: Sequence[_Span],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> np.ndarray:
        """Read the part of a parameter of one layer, or expert, that spans cut out."""
        (tensor, beside), lead = self.tensors[name, at], len(at)
        dims = shapes[name][lead:]
        inputs = self.parts.inputs(name)
        rows, shape_in, cut_in = _flat(spans[:inputs], dims[:inputs])
        columns, shape_out, cut_out = _flat(spans[inputs:], dims[inputs:])
        before = beside[: beside.index(name)]
        split = [math.prod(shapes[b][lead:][inputs:]) for b in before]
        columns = slice(columns.start + sum(split), columns.stop + sum(split))
        if not inputs:
            x = self.folder.read(tensor, columns, None)
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
