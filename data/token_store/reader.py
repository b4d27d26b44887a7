"""Read one split of a token store at random, from memory if the split is small.

TensorStore reads the arrays, but random stretches of a store on a local disk are read
directly from its files, several times as fast (token_store/local_shards.py). If such a
read fails, TensorStore reads the stretch again, and succeeds or names the damage. Every
chunk that is read is compared with its checksum. An array that is read into memory is
also compared with its hash in the manifest. A missing chunk is an error and is not read
as zeros. For each chunk of tokens that is not in memory, an open split has 13 bytes in
memory: an int64 of the index, a CRC-32C and a flag.
"""

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from data.batch import expand_groups
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.token_store.layout import ARRAYS, CHUNK_LENGTH, SHARD_LENGTH, chunk_checksums
from data.token_store.local_shards import LocalShards

# Tokens up to this size, and document starts up to this number, are read into memory
# once, so that reading a row costs one copy.
MEMORY_LIMIT_BYTES = 2**30
OFFSETS_LIMIT = 2**23
_CACHE_LIMIT_BYTES = 2**28

log = logging.getLogger(__name__)


class ExternalTokens(Protocol):
    """The tokens of a split that lie in files of another program."""

    dtype: np.dtype

    def read(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read spans [start, stop); raise DataError if they are missing or damaged."""
        ...


class TokenArray:
    """One split of a store: a flat array of tokens, and the starts of its documents.

    Methods that read raise DataError if a chunk is missing or damaged.
    """

    def __init__(
        self,
        storage: KeyValueStore,
        split: str,
        num_documents: int,
        num_tokens: int,
        digests: Mapping[str, str] = MappingProxyType({}),
        checksums: Mapping[str, np.ndarray] = MappingProxyType({}),
        keep: bool = True,
        external: ExternalTokens | None = None,
    ):
        """Open a split of a store.

        `digests` are SHA-256 by array, `checksums` the CRC-32C of chunks by array. With
        `keep`, small arrays are read into memory and stay there. `external` reads the
        tokens if they are not in the store.
        """
        self._storage = storage
        self._split = split
        self._digests = digests
        self._checksums = checksums
        self._num_tokens = num_tokens
        self.num_documents = num_documents
        lengths = {
            "tokens": num_tokens,
            "offsets": num_documents + 1,
            "id_offsets": num_documents + 1,
            "index": -(-num_tokens // CHUNK_LENGTH) + 1,
        }
        self._external = external
        stored = ARRAYS if external is None else ARRAYS[1:]
        self._arrays: dict[str, Any] = {name: self._open_array(name) for name in stored}
        for name, length in lengths.items():
            if name not in stored:
                continue
            if (actual := self._arrays[name].shape[0]) != length:
                raise self._damage_error(name, 0, 0, f"its length is {actual}")
        if external is None:
            dtype = self._arrays["tokens"].dtype.numpy_dtype
        else:
            dtype = external.dtype
        num_bytes = num_tokens * dtype.itemsize
        self.in_memory = keep and num_bytes <= MEMORY_LIMIT_BYTES
        self._offsets_in_memory = keep and (
            self.in_memory or num_documents <= OFFSETS_LIMIT
        )
        if self.in_memory:
            self._arrays["tokens"] = self._read_and_verify("tokens")
        if self._offsets_in_memory:
            self._arrays["offsets"] = self._read_and_verify("offsets")
        self._local: dict[str, LocalShards] = {}
        for name, array in self._arrays.items():
            if storage.path is not None and isinstance(array, ts.TensorStore):
                folder = storage.path / split / name
                dtype = array.dtype.numpy_dtype
                self._local[name] = LocalShards(
                    folder, dtype, array.shape[0], checksums.get(name)
                )

    @property
    def is_local(self) -> bool:
        """Whether tokens are read from memory or directly from local files."""
        return self.in_memory or "tokens" in self._local or self._external is not None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._num_tokens

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """All documents' starts, then the split's end: int64 [documents + 1]."""
        return self.array("offsets")

    @functools.cached_property
    def index(self) -> np.ndarray:
        """The number of document starts before each chunk: int64 [chunks + 1]."""
        return self._read_and_verify("index")

    def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read values [start, stop) of an array by its name; by default, all values."""
        end = self._length(name) if stop is None else stop
        return self._read_array(name, [(start, end)])[0]

    def _length(self, name: str) -> int:
        return len(self) if name == "tokens" else int(self._arrays[name].shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), in the store's dtype."""
        return self.array("tokens", start, stop)

    def iterate_shards(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array shard by shard; errors name the damaged chunk."""
        length = self._length(name)
        for start in range(0, length, SHARD_LENGTH):
            stop = min(start + SHARD_LENGTH, length)
            try:
                yield self.array(name, start, stop)
            except DataError:
                for chunk in range(start, stop, CHUNK_LENGTH):
                    self.array(name, chunk, min(chunk + CHUNK_LENGTH, stop))
                raise

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Read lengths[i] tokens from starts[i] on for each i, in the store's dtype."""
        spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return self._read_spans("tokens", list(spans))

    def starts_within(
        self, lows: np.ndarray, highs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find document starts in ranges (low, high]; the split's end counts as one.

        A range that includes the split's first token has low = -1.

        Returns int64 [n], each start's range as an index, and int64 [n], the starts.
        """
        if self._offsets_in_memory:
            first = np.searchsorted(self.offsets, lows, "right")
            stop = np.searchsorted(self.offsets, highs, "right")
            ranges, index = expand_groups(stop - first)
            return ranges, self.offsets[first[ranges] + index]
        num_chunks = len(self.index) - 1
        low_chunks = np.maximum(lows, 0) // CHUNK_LENGTH
        firsts = self.index[np.minimum(low_chunks, num_chunks)]
        lasts = self.index[np.minimum(highs // CHUNK_LENGTH + 1, num_chunks)]
        stops = np.minimum(lasts, self.num_documents) + 1
        spans = list(zip(firsts.tolist(), stops.tolist(), strict=True))
        ranges = [np.zeros(0, np.int64)]
        starts = [np.zeros(0, np.int64)]
        for number, offsets in enumerate(self._read_spans("offsets", spans)):
            is_inside = (offsets > lows[number]) & (offsets <= highs[number])
            starts.append(offsets[is_inside])
            ranges.append(np.full(len(starts[-1]), number))
        return np.concatenate(ranges), np.concatenate(starts)

    def _read_and_verify(self, name: str) -> np.ndarray:
        """Read a whole array, and compare its hash with the hash in the manifest."""
        values = self.array(name)
        digest = hashlib.sha256(values.data).hexdigest()
        if self._digests.get(name, digest) != digest:
            reason = "its values are not those of the manifest"
            raise self._damage_error(name, 0, len(values), reason)
        return values

    def _read_spans(self, name: str, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read spans [start, stop), directly from local files if possible."""
        if (shards := self._local.get(name)) is not None:
            try:
                return shards.read(spans)
            except (OSError, ValueError) as error:
                log.warning("%s; reading it again through TensorStore", error)
        return self._read_array(name, spans)

    def _read_array(self, name: str, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Read spans from memory, from files of another program or by TensorStore."""
        if name not in self._arrays:
            assert self._external is not None
            return self._external.read(spans)
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            return [array[start:stop] for start, stop in spans]
        # TensorStore reads whole chunks in any case, and only chunks have checksums.
        # All reads are in flight before the first one is awaited.
        first_chunks = [start // CHUNK_LENGTH for start, _ in spans]
        stop_chunks = [-(-stop // CHUNK_LENGTH) for _, stop in spans]
        reads = deque(
            array[a * CHUNK_LENGTH : min(b * CHUNK_LENGTH, array.shape[0])].read()
            for a, b in zip(first_chunks, stop_chunks, strict=True)
        )
        values = []
        for (start, stop), first_chunk in zip(spans, first_chunks, strict=True):
            try:
                chunks = reads.popleft().result()
                self._check_chunks(name, first_chunk, chunks)
            except (ValueError, OSError) as error:
                raise self._damage_error(name, start, stop, str(error)) from error
            offset = first_chunk * CHUNK_LENGTH
            span = chunks[start - offset : stop - offset]
            values.append(span if span.size == chunks.size else span.copy())
        return values

    def _check_chunks(self, name: str, first: int, chunks: np.ndarray) -> None:
        """Compare chunks from number `first` on with the checksums in the store."""
        if name not in self._checksums:
            return
        actual = chunk_checksums(chunks)
        expected = self._checksums[name][first : first + len(actual)]
        if len(mismatches := np.flatnonzero(actual != expected)):
            raise ValueError(f"chunk {first + mismatches[0]} is one of another store")

    def _open_array(self, name: str) -> ts.TensorStore:
        spec = {
            "driver": "zarr3",
            "kvstore": self._storage.spec(f"{self._split}/{name}"),
            # A store has every chunk, so a missing one is damage and not zeros.
            "fill_missing_data_reads": False,
            # Stores do not change, so cached data need not be validated again.
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "context": {"cache_pool": {"total_bytes_limit": _CACHE_LIMIT_BYTES}},
        }
        try:
            return ts.open(spec, read=True, open=True).result()
        except (ValueError, OSError) as error:
            raise self._damage_error(name, 0, 0, str(error)) from error

    def _damage_error(self, name: str, start: int, stop: int, error: str) -> DataError:
        location = f"{self._storage}/{self._split}/{name}"
        state = "is"
        if stop > start:
            shards = range(start // SHARD_LENGTH, (stop - 1) // SHARD_LENGTH + 1)
            location += "/" + ", ".join(f"c/{shard}" for shard in shards)
            state = f"values {start} to {stop - 1} are"
        return DataError(
            f"{location}: {state} missing or damaged ({error}). Delete {self._storage} "
            f"and build it again, or bring back that file from a copy"
        )
