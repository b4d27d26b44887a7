"""Write documents as a token store.

    <store>/train/tokens        uint16 or uint32, one flat array
    <store>/train/offsets       int64, the start of each document, then the end
    <store>/train/documents.json  the ids, in the same order
    <store>/validation/...      the same
    <store>/manifest.json       written last: a folder without one is no store

The arrays are zarr v3, sharded, each chunk with its CRC-32C. Memory use is that of
one document and one shard, however long the text.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import tiktoken

from data import tokenizer
from data.corpus import SPLITS, Corpus

SCHEMA = 1
MANIFEST = "manifest.json"
# A chunk is the least that a random row must read and check; a shard is one file.
CHUNK_LENGTH = 2**14
SHARD_LENGTH = 2**25

_log = logging.getLogger(__name__)


def write_store(
    path: Path,
    corpus: Corpus,
    encoding: tiktoken.Encoding,
    tokenizer_name: str,
    tokenizer_sha256: str | None,
) -> None:
    """Encode a corpus into the existing, empty folder `path`.

    `tokenizer_name` and `tokenizer_sha256` are what `load_tokenizer` takes to give
    this encoding again.

    Raises:
        DataError: a document cannot be read.
    """
    digest = hashlib.sha256()
    splits = {}
    for split in SPLITS:
        folder = path / split
        folder.mkdir()
        documents = corpus.documents(split)
        end = None if corpus.is_single_file else encoding.eot_token
        splits[split] = _write_split(folder, documents, encoding, end, digest)
    manifest = {
        "schema": SCHEMA,
        "tokenizer": tokenizer_name,
        "tokenizer_sha256": tokenizer_sha256,
        "tokenizer_fingerprint": tokenizer.fingerprint(encoding),
        "source": {"path": str(corpus.root), "validation": corpus.validation},
        "splits": splits,
        "fingerprint": digest.hexdigest(),
    }
    partial = path / (MANIFEST + ".partial")
    with partial.open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / MANIFEST)


def _write_split(
    folder: Path,
    documents: Iterable[tuple[str, bytes]],
    encoding: tiktoken.Encoding,
    end: int | None,
    digest: Any,
) -> dict[str, int]:
    """Write one split's documents, each followed by the token `end`; count them."""
    dtype = np.dtype("<u2") if encoding.n_vocab <= 2**16 else np.dtype("<u4")
    tokens = _ArrayWriter(folder / "tokens", dtype)
    offsets, ids, num_bytes, logged = [0], [], 0, time.monotonic()
    for name, text in documents:
        encoded = tokenizer.encode(encoding, text).astype(dtype)
        if end is not None:
            encoded = np.append(encoded, np.array(end, dtype))
        tokens.append(encoded)
        digest.update(encoded.data)
        offsets.append(offsets[-1] + len(encoded))
        ids.append(name)
        num_bytes += len(text)
        if time.monotonic() - logged > 5:
            logged = time.monotonic()
            _log.info("%s: %d documents, %d bytes", folder.name, len(ids), num_bytes)
    tokens.close()
    starts = np.array(offsets, "<i8")
    digest.update(starts.data)
    offset_writer = _ArrayWriter(folder / "offsets", starts.dtype)
    offset_writer.append(starts)
    offset_writer.close()
    (folder / "documents.json").write_text(json.dumps(ids))
    return {"documents": len(ids), "tokens": offsets[-1], "bytes": num_bytes}


class _ArrayWriter:
    """Appends to a flat array of unknown length, a whole shard at a time."""

    def __init__(self, path: Path, dtype: np.dtype):
        checked = [{"name": "bytes"}, {"name": "crc32c"}]
        sharding = {"chunk_shape": [CHUNK_LENGTH], "codecs": checked}
        self._array = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(path) + "/"},
                # A chunk of zeros must be there too: a missing one is then damage.
                "store_data_equal_to_fill_value": True,
                "metadata": {
                    "shape": [0],
                    "data_type": dtype.name,
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [SHARD_LENGTH]},
                    },
                    "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                },
            },
            create=True,
        ).result()
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def append(self, values: np.ndarray) -> None:
        self._waiting.append(values)
        self._num_waiting += len(values)
        if self._num_waiting >= SHARD_LENGTH:
            self._write(self._num_waiting // SHARD_LENGTH * SHARD_LENGTH)

    def close(self) -> None:
        self._write(self._num_waiting)

    def _write(self, count: int) -> None:
        if not self._waiting:
            return
        values = np.concatenate(self._waiting)
        start = self._array.shape[0]
        if count:
            self._array = self._array.resize(exclusive_max=[start + count]).result()
            self._array[start : start + count].write(values[:count]).result()
        self._waiting, self._num_waiting = [values[count:]], len(values) - count
