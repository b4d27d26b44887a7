"""One split of a token store, read at random: from memory when it is small.

TensorStore reads, except for stretches at random of a store on a local disk: these are
read from its files directly, several times as fast (token_store/local_shards.py). What
goes wrong there is read again by TensorStore, which may succeed or names the damage.
Chunks are compared with the checksums of the manifest; an array that is read whole is
hashed. A chunk that is not there is damage too, never zeros. Opening costs an int64, a
checksum and a byte for each chunk.
"""

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorstore as ts

from data.batch import group_members
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.token_store.local_shards import LocalShards
from data.token_store.writer import (
    ARRAYS,
    CHUNK_LENGTH,
    SHARD_LENGTH,
    chunk_checksums,
)

# Tokens up to this size are read into memory once, so that a row costs one copy. So are
# the starts of documents up to the given number.
MEMORY_LIMIT_BYTES = 2**30
OFFSETS_LIMIT = 2**23
_CACHE_LIMIT_BYTES = 2**28

log = logging.getLogger(__name__)


class TokenArray:
    """One split of a store: a flat array of tokens, and where its documents start.

    Whatever reads raises a DataError of a chunk that is missing or damaged.
    """

    def __init__(
        self,
        storage: KeyValueStore,
        split: str,
        documents: int,
        tokens: int,
        digests: Mapping[str, str] = MappingProxyType({}),
        checksums: Mapping[str, np.ndarray] = MappingProxyType({}),
        keep: bool = True,
    ):
        """Open a split of a store with the counts, SHA-256 and CRC-32C of its manifest.

        `keep`: whether small arrays are read into memory.
        """
        self._storage, self._split = storage, split
        self._digests, self._checksums = digests, checksums
        self._num_tokens, self.num_documents = tokens, documents
        lengths = {
            "tokens": tokens,
            "offsets": documents + 1,
            "id_offsets": documents + 1,
            "index": -(-tokens // CHUNK_LENGTH) + 1,
        }
        self._arrays: dict[str, Any] = {name: self._open(name) for name in ARRAYS}
        for name, length in lengths.items():
            if (found := self._arrays[name].shape[0]) != length:
                raise self._damaged(name, 0, 0, f"its length is {found}")
        size = tokens * self._arrays["tokens"].dtype.numpy_dtype.itemsize
        self.in_memory = keep and size <= MEMORY_LIMIT_BYTES
        self._offsets_in_memory = keep and (
            self.in_memory or documents <= OFFSETS_LIMIT
        )
        if self.in_memory:
            self._arrays["tokens"] = self._whole("tokens")
        if self._offsets_in_memory:
            self._arrays["offsets"] = self._whole("offsets")
        self._local: dict[str, LocalShards] = {}
        for name, array in self._arrays.items():
            if storage.path is not None and isinstance(array, ts.TensorStore):
                folder, dtype = storage.path / split / name, array.dtype.numpy_dtype
                known = checksums.get(name)
                self._local[name] = LocalShards(folder, dtype, array.shape[0], known)

    @property
    def is_local(self) -> bool:
        """Whether tokens come from memory or from a local disk's files themselves."""
        return self.in_memory or "tokens" in self._local

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._num_tokens

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """All documents' starts, then the end: int64 [documents + 1]."""
        return self.array("offsets")

    @functools.cached_property
    def _index(self) -> np.ndarray:
        return self._whole("index")

    def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read a stretch of an array by its name."""
        end = int(self._arrays[name].shape[0]) if stop is None else stop
        return self._stored(name, [(start, end)])[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), in the store's dtype."""
        return self.array("tokens", start, stop)

    def stretches(self, name: str) -> Iterator[np.ndarray]:
        """Read an array shard by shard; what is damaged is named by chunk."""
        length = self._arrays[name].shape[0]
        for start in range(0, length, SHARD_LENGTH):
            stop = min(start + SHARD_LENGTH, length)
            try:
                yield self.array(name, start, stop)
            except DataError:
                for chunk in range(start, stop, CHUNK_LENGTH):
                    self.array(name, chunk, min(chunk + CHUNK_LENGTH, stop))
                raise

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Read `lengths` tokens from each of `starts` on, in the store's dtype."""
        spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return self._read("tokens", list(spans))

    def starts_within(
        self, lows: np.ndarray, highs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the documents, the end as one, that start in each stretch (low, high].

        Returns for each of them which stretch it is in, and its start; both int64.
        """
        if self._offsets_in_memory:
            first = np.searchsorted(self.offsets, lows, "right")
            last = np.searchsorted(self.offsets, highs, "right")
            row, nth = group_members(last - first)
            return row, self.offsets[first[row] + nth]
        blocks = len(self._index) - 1
        firsts = self._index[np.minimum(lows // CHUNK_LENGTH, blocks)]
        lasts = self._index[np.minimum(highs // CHUNK_LENGTH + 1, blocks)]
        stops = np.minimum(lasts, self.num_documents) + 1
        spans = list(zip(firsts.tolist(), stops.tolist(), strict=True))
        rows, starts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, offsets in enumerate(self._read("offsets", spans)):
            inside = offsets[(offsets > lows[row]) & (offsets <= highs[row])]
            rows.append(np.full(len(inside), row))
            starts.append(inside)
        return np.concatenate(rows), np.concatenate(starts)

    def document_at(self, token: int) -> tuple[int, int, int]:
        """Return the document that a token belongs to: its number, start and end."""
        block = token // CHUNK_LENGTH
        first = max(0, int(self._index[block]) - 1)
        offsets = self.array("offsets", first, int(self._index[block + 1]) + 1)
        nth = int(np.searchsorted(offsets, token, "right")) - 1
        return first + nth, int(offsets[nth]), int(offsets[nth + 1])

    def document_id(self, number: int) -> str:
        """Read a document's id."""
        start, stop = self.array("id_offsets", number, number + 2).tolist()
        return self.array("ids", start, stop).tobytes().decode()

    def _whole(self, name: str) -> np.ndarray:
        """Read an array whole, and compare its hash with the manifest's."""
        values = self.array(name)
        digest = hashlib.sha256(values.data).hexdigest()
        if self._digests.get(name, digest) != digest:
            reason = "its values are not those of the manifest"
            raise self._damaged(name, 0, len(values), reason)
        return values

    def _read(self, name: str, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read stretches [start, stop) that lie anywhere, the fastest way."""
        if (shards := self._local.get(name)) is not None:
            try:
                return shards.read(spans)
            except (OSError, ValueError) as error:
                log.warning("%s; reading it again through TensorStore", error)
        return self._stored(name, spans)

    def _stored(self, name: str, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read stretches from memory, or through TensorStore."""
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            return [array[start:stop] for start, stop in spans]
        # TensorStore reads whole chunks in any case, and only they can be compared. All
        # reads are under way before the first one is awaited.
        firsts = [start // CHUNK_LENGTH for start, _ in spans]
        lasts = [-(-stop // CHUNK_LENGTH) for _, stop in spans]
        reads = deque(
            array[a * CHUNK_LENGTH : min(b * CHUNK_LENGTH, array.shape[0])].read()
            for a, b in zip(firsts, lasts, strict=True)
        )
        values = []
        for (start, stop), chunk in zip(spans, firsts, strict=True):
            try:
                chunks = reads.popleft().result()
                self._compare(name, chunk, chunks)
            except (ValueError, OSError) as error:
                raise self._damaged(name, start, stop, str(error)) from error
            part = chunks[start - chunk * CHUNK_LENGTH : stop - chunk * CHUNK_LENGTH]
            values.append(part if part.size == chunks.size else part.copy())
        return values

    def _compare(self, name: str, first: int, chunks: np.ndarray) -> None:
        """Compare chunks from number `first` on with the checksums of the manifest."""
        if name not in self._checksums:
            return
        found = chunk_checksums(chunks)
        other = np.flatnonzero(found != self._checksums[name][first:][: len(found)])
        if len(other):
            raise ValueError(f"chunk {first + other[0]} is one of another store")

    def _open(self, name: str) -> ts.TensorStore:
        spec = {
            "driver": "zarr3",
            "kvstore": self._storage.spec(f"{self._split}/{name}"),
            # A store holds every chunk, so that a missing one is not read as zeros.
            "fill_missing_data_reads": False,
            # Stores do not change: what was read once need not be looked at again.
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "context": {"cache_pool": {"total_bytes_limit": _CACHE_LIMIT_BYTES}},
        }
        try:
            return ts.open(spec, read=True, open=True).result()
        except (ValueError, OSError) as error:
            raise self._damaged(name, 0, 0, str(error)) from error

    def _damaged(self, name: str, start: int, stop: int, error: str) -> DataError:
        place = f"{self._storage}/{self._split}/{name}"
        state = "is"
        if stop > start:
            shards = range(start // SHARD_LENGTH, (stop - 1) // SHARD_LENGTH + 1)
            place += "/" + ", ".join(f"c/{shard}" for shard in shards)
            state = f"values {start} to {stop - 1} are"
        return DataError(
            f"{place}: {state} missing or damaged ({error}). Delete {self._storage} "
            f"and build it again, or bring back that file from a copy"
        )
