"""Write weights as safetensors files.

Tensors are gathered one by one from the devices of all processes, and process 0 writes
them to files of at most two gigabytes. Host memory holds one tensor at a time, but a
whole file if the folder is under s3:// or gs://.
"""

import collections
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from data.storage import write_atomically
from train.pretrained.tensors import FamilyTensors

FILE_BYTES = 2 * 10**9


def write_weights(
    folder: epath.Path,
    tensors: FamilyTensors,
    params: dict[str, jax.Array],
    dtype: np.dtype,
) -> int:
    """Write weights and, for several files, an index; return the number of parameters.

    `params` maps names to arrays with any sharding.
    """
    shapes = tensors.shapes(params)
    sizes = {
        name: math.prod(shape) * tensors.dtype_of(name, dtype).itemsize
        for name, shape in shapes.items()
    }
    groups = list(_group_by_file(sizes))
    file_of = dict[str, str]()
    for number, names in enumerate(groups, 1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        content = _file_content(tensors, params, {n: shapes[n] for n in names}, dtype)
        if jax.process_index() == 0:
            write_atomically(folder / file, content)
        collections.deque(content, maxlen=0)  # lets other processes join each gather
        file_of |= dict.fromkeys(names, file)
    copies = tensors.copies
    count = sum(math.prod(x) for name, x in shapes.items() if name not in copies)
    if len(groups) > 1 and jax.process_index() == 0:
        size = {"total_size": sum(sizes.values())}
        index = {"metadata": size, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)
    return count


def _file_content(
    tensors: FamilyTensors,
    params: dict[str, jax.Array],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces; all processes must iterate together.

    Source: safetensors 0.8, README, "Format". Older versions of transformers refuse a
    file whose metadata do not say "pt".
    """
    dtype_names = {"float32": "F32", "bfloat16": "BF16"}
    dtypes = {name: tensors.dtype_of(name, dtype) for name in shapes}
    header = dict[str, Any](__metadata__={"format": "pt"})
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtypes[name].itemsize
        dtype_name = dtype_names[dtypes[name].name]
        offsets = [start, end]
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in shapes:
        yield tensors.read(params, name).astype(dtypes[name]).tobytes()


def _group_by_file(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the tensor names of each file: at most FILE_BYTES, or one larger tensor."""
    names = list[str]()
    total = 0
    for name, size in sizes.items():
        if names and total + size > FILE_BYTES:
            yield names
            names = []
            total = 0
        names.append(name)
        total += size
    yield names


def write_json(file: epath.Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
