"""Write weights as files of tensors.

Tensors go one by one from the devices to files of at most two gigabytes, so that this
machine's memory holds one such file besides what the devices hold.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from train.pretrained.tensors import Parts
from train.run.storage import write_whole

FILE_BYTES = 2 * 10**9


def write_weights(
    folder: epath.Path, parts: Parts, params: dict[str, jax.Array], dtype: np.dtype
) -> int:
    """Write the weights and, if they are several files, an index.

    Args:
        folder: where.
        parts: what the tensors are made of.
        params: arrays by name, sharded in any way over this process' devices.
        dtype: of what is written.

    Returns:
        How many parameters were written.
    """
    from safetensors.numpy import save

    shapes = parts.shapes(params)
    files = list(_files({k: math.prod(s) * dtype.itemsize for k, s in shapes.items()}))
    where = dict[str, str]()
    for number, names in enumerate(files, 1):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        arrays = {name: parts.read(params, name).astype(dtype) for name in names}
        # Older versions of transformers refuse a file that does not say this.
        write_whole(folder / file, save(arrays, metadata={"format": "pt"}))
        where |= dict.fromkeys(names, file)
    count = sum(map(math.prod, shapes.values()))
    if len(files) > 1:
        index = {"metadata": {"total_size": count * dtype.itemsize}}
        write_json(
            folder / "model.safetensors.index.json", index | {"weight_map": where}
        )
    return count


def _files(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Divide tensors, in order, into files of at most FILE_BYTES; one at least each."""
    names, total = list[str](), 0
    for name, size in sizes.items():
        if names and total + size > FILE_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def write_json(file: epath.Path, content: Any) -> None:
    """Write a file of JSON."""
    write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
