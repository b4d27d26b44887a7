"""Write encoded segments as a token store, whose files layout.py describes.

Writing the same segments again gives the same bytes. Writing takes the memory of a few
shards.
"""

import collections
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorstore as ts

from data.key_value_store import KeyValueStore
from data.splits import SPLITS, Split
from data.token_store.layout import (
    ARRAYS,
    CHUNK_LENGTH,
    MANIFEST,
    MANIFEST_DIGEST,
    RANKS,
    RUNS,
    SCHEMA,
    SHARD_LENGTH,
    SKIPPED,
    checksum_file,
    chunk_checksums,
)
from data.token_store.parts import SegmentSplit, StoreSegment


def write_store(
    storage: KeyValueStore,
    segments: Iterable[StoreSegment],
    dtype: np.dtype,
    entries: dict[str, Any],
    ranks: bytes | None = None,
    runs: Callable[[Split], bytes] | None = None,
) -> None:
    """Write a store of `segments`, in their order, into an empty folder.

    `entries`, such as the tokenizer and the source, are added to the manifest. `ranks`
    is the content of the tokenizer's rank file, which is stored with the tokens.

    With `runs`, the tokens stay in the files that they come from, and the store has
    only their checksums. After the last segment, `runs` returns the content of a
    split's file RUNS, which says where its tokens lie.

    Raises DataError if the storage cannot be written.
    """
    splits: dict[Split, _SplitWriter] = {
        split: _SplitWriter(storage, split, dtype, has_tokens=runs is None)
        for split in SPLITS
    }
    num_bytes = collections.Counter()
    num_empty = 0
    skipped = []
    for segment in segments:
        for split, writer in splits.items():
            writer.append(segment.splits[split])
        num_bytes.update(segment.notes["bytes"])
        num_empty += segment.notes["empty"]
        skipped += segment.notes["bad"]
    counts = {s: w.close() | {"bytes": num_bytes[s]} for s, w in splits.items()}
    digests = {
        split: {name: array.digest.hexdigest() for name, array in writer.arrays.items()}
        for split, writer in splits.items()
    }
    keys = "file", "place", "reason"
    lines = [json.dumps(dict(zip(keys, bad, strict=True))) + "\n" for bad in skipped]
    files = {SKIPPED: "".join(lines).encode()}
    for split, writer in splits.items():
        for name, array in writer.arrays.items():
            files[checksum_file(split, name)] = bytes(array.checksums)
    if ranks is not None:
        files[RANKS] = ranks
    if runs is not None:
        files |= {f"{split}/{RUNS}": runs(split) for split in SPLITS}
    for name, content in files.items():
        storage.write(name, content)
    stored = ARRAYS if runs is None else ARRAYS[1:]
    small_files = [f"{split}/{name}/zarr.json" for split in SPLITS for name in stored]
    small_files += files
    content_digests = [digests[split][name] for split in SPLITS for name in ARRAYS[:2]]
    manifest = {
        "schema": SCHEMA,
        **entries,
        "splits": counts,
        "empty_documents": num_empty,
        "skipped_records": len(skipped),
        "fingerprint": hashlib.sha256(" ".join(content_digests).encode()).hexdigest(),
        "digests": digests,
        "files": {
            name: hashlib.sha256(storage.read(name)).hexdigest() for name in small_files
        },
    }
    text = (json.dumps(manifest, indent=2) + "\n").encode()
    storage.write(MANIFEST_DIGEST, hashlib.sha256(text).hexdigest().encode())
    storage.write(MANIFEST, text)


class _SplitWriter:
    """Writes the five arrays of a split; without `has_tokens`, the last four."""

    def __init__(
        self, storage: KeyValueStore, split: str, dtype: np.dtype, has_tokens: bool
    ):
        dtypes = (dtype, np.int64, np.int64, np.uint8, np.int64)
        self.arrays: dict[str, _ArrayChecks] = {
            name: _ArrayWriter(storage.spec(f"{split}/{name}"), np.dtype(dtype))
            for name, dtype in zip(ARRAYS, dtypes, strict=True)
            if has_tokens or name != "tokens"
        }
        if not has_tokens:
            self.arrays["tokens"] = _ArrayChecks(dtype)
        self._num_documents = self._num_tokens = self._num_id_bytes = 0
        # The start of the next document, and the first chunk that the index lacks.
        self._next_start = self._next_chunk = 0
        for name in ("offsets", "id_offsets"):
            self.arrays[name].append(np.zeros(1))

    def append(self, segment: SegmentSplit) -> None:
        ends = self._num_tokens + segment.ends
        if len(ends):
            starts = np.concatenate([[self._next_start], ends[:-1]])
            chunks = np.arange(self._next_chunk, starts[-1] // CHUNK_LENGTH + 1)
            num_documents = np.searchsorted(starts, chunks * CHUNK_LENGTH)
            self.arrays["index"].append(self._num_documents + num_documents)
            self._next_start = ends[-1]
            self._next_chunk += len(chunks)
        self.arrays["tokens"].append(segment.tokens)
        self.arrays["offsets"].append(ends)
        self.arrays["ids"].append(segment.ids)
        self.arrays["id_offsets"].append(self._num_id_bytes + segment.id_ends)
        self._num_documents += len(ends)
        self._num_tokens += len(segment.tokens)
        self._num_id_bytes += len(segment.ids)

    def close(self) -> dict[str, int]:
        assert self._next_start == self._num_tokens, "the last document has no end"
        num_entries = -(-self._num_tokens // CHUNK_LENGTH) + 1
        self.arrays["index"].append(
            np.full(num_entries - self._next_chunk, self._num_documents)
        )
        for array in self.arrays.values():
            array.close()
        return {"documents": self._num_documents, "tokens": self._num_tokens}


class _ArrayChecks:
    """Computes the checksums of an array that is appended to by whole shards."""

    def __init__(self, dtype: np.dtype):
        self.digest = hashlib.sha256()
        self.checksums = bytearray()
        self._dtype = dtype
        self._buffer: list[np.ndarray] = []
        self._num_buffered = 0

    def append(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, self._dtype)
        self.digest.update(values.data)
        self._buffer.append(values)
        self._num_buffered += len(values)
        if self._num_buffered >= SHARD_LENGTH:
            self._flush(self._num_buffered // SHARD_LENGTH * SHARD_LENGTH)

    def close(self) -> None:
        self._flush(self._num_buffered)

    def _flush(self, count: int) -> None:
        if not count:
            return
        values = np.concatenate(self._buffer)
        self.checksums += chunk_checksums(values[:count]).tobytes()
        self._write(values[:count])
        self._buffer = [values[count:]]
        self._num_buffered = len(values) - count

    def _write(self, values: np.ndarray) -> None:
        """Write values if the array is stored; this one is not."""


class _ArrayWriter(_ArrayChecks):
    """Writes a flat array of unknown length."""

    def __init__(self, kvstore: dict[str, Any], dtype: np.dtype):
        super().__init__(dtype)
        chunk_codecs = [{"name": "bytes"}, {"name": "crc32c"}]
        sharding = {"chunk_shape": [CHUNK_LENGTH], "codecs": chunk_codecs}
        shards = {"chunk_shape": [SHARD_LENGTH]}
        metadata = {
            "shape": [0],
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": shards},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
        # Chunks of zeros are stored too, so that a missing chunk always means damage.
        spec["store_data_equal_to_fill_value"] = True
        self._array = ts.open(spec, create=True).result()
        self._write_in_flight: Any = None

    def close(self) -> None:
        super().close()
        self._wait()

    def _wait(self) -> None:
        if self._write_in_flight is not None:
            self._write_in_flight.result()

    def _write(self, values: np.ndarray) -> None:
        start = self._array.shape[0]
        stop = start + len(values)
        self._wait()  # keep only one write in flight
        self._array = self._array.resize(exclusive_max=[stop]).result()
        self._write_in_flight = self._array[start:stop].write(values)
