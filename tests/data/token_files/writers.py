"""Write token files as other trainers do, and a store of the same tokens."""

import json
import struct
from pathlib import Path

import numpy as np

from data.catalog import FORMATS
from data.prepare_config import PrepareConfig
from data.token_store.build import prepare_store

END = 256  # of the tokenizer "bytes"


def documents(count: int = 60) -> list[str]:
    return [f"document {n} " * (n % 7 + 1) + "é猫" * (n % 3) for n in range(count)]


def tokens_of(texts: list[str]) -> list[np.ndarray]:
    return [np.array([*text.encode(), END]) for text in texts]


def write_megatron(path: Path, parts: list[np.ndarray], dtype: str = "<u2") -> Path:
    """Write a pair of files; every third document is two sequences."""
    codes = {"u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}
    bounds = [0]
    sequences = []
    for number, part in enumerate(parts):
        sequences += np.array_split(part, 2) if number % 3 == 0 else [part]
        bounds.append(len(sequences))
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    size = np.dtype(dtype).itemsize
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * size
    numbers = struct.pack("<QBQQ", 1, codes[dtype], len(lengths), len(bounds))
    index = b"MMIDIDX\0\0" + numbers + lengths.tobytes() + pointers.tobytes()
    path.with_suffix(".idx").write_bytes(index + np.array(bounds, "<i8").tobytes())
    path.with_suffix(".bin").write_bytes(np.concatenate(parts).astype(dtype).tobytes())
    return path.with_suffix("")


def write_nanogpt(path: Path, parts: list[np.ndarray]) -> Path:
    path.write_bytes(np.concatenate(parts).astype("<u2").tobytes())
    return path


def write_llmc(path: Path, parts: list[np.ndarray], version: int = 1) -> Path:
    tokens = np.concatenate(parts).astype("<u4" if version == 7 else "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801 if version == 7 else 20240520, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_llmc_7(path: Path, parts: list[np.ndarray]) -> Path:
    return write_llmc(path, parts, 7)


WRITERS = [
    ("megatron", write_megatron),
    ("nanogpt", write_nanogpt),
    ("llmc", write_llmc),
    ("llmc", write_llmc_7),
]


def write_store_of(path: Path, texts: list[str]) -> Path:
    """Prepare a store whose documents have the ids of those in a file at `path`."""
    starts = np.cumsum([0, *map(len, tokens_of(texts))]).tolist()
    pairs = zip(starts, texts, strict=False)
    records = [{"id": f"{path.name}:{start}", "text": text} for start, text in pairs]
    input_path = path.with_suffix(".jsonl")
    input_path.write_text("".join(json.dumps(record) + "\n" for record in records))
    output = path.with_suffix(".store")
    prepare_store(
        PrepareConfig(str(input_path), str(output), id_field="id", validation=0.2),
        FORMATS,
    )
    return output
