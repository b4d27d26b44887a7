"""Seal files of tokens at first use, and open them as a store.

A seal is a token store in the cache folder whose tokens stay in the files. It has the
starts and ids of the documents, the checksums of all chunks and the fingerprint, which
equals that of a store of the same tokens and documents. Its folder's name contains a
hash of the files' sizes and times of change, so changed files are sealed again and get
another fingerprint.

A document's id is its file and its first token there. As in stores, a hash of the id
decides its split. If there is only one document, its end is held out.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken

from data.config import DataConfig
from data.encoding import decode_bytes, fingerprint
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.splits import SPLITS, Split
from data.token_files.formats import TokenFiles, find_token_files
from data.token_files.reader import FileTokens
from data.token_store.cached import build_once
from data.token_store.layout import RUNS, SCHEMA, checksum_file
from data.token_store.parts import SegmentSplit, StoreSegment, split_of, token_dtype
from data.token_store.progress import Meter
from data.token_store.store import Store, data_cache_folder, open_store
from data.token_store.writer import write_store
from data.tokenizer import load_tokenizer

_VERSION = 1  # of seals; older ones are not used again
_BLOCK_TOKENS = 2**22


def sealed_store(
    config: DataConfig, beat: Callable[[], object] = lambda: None
) -> Store:
    """Open the token files of a config as a store, and seal them at first use.

    Any number of processes may seal the same files at once. `beat` is called for each
    block of tokens. Raises DataError if a file or the tokenizer is missing or damaged,
    or a token is outside the vocabulary.
    """
    encoding = load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    files = find_token_files(config)
    end_token = encoding.eot_token if config.end_token is None else config.end_token
    if not 0 <= end_token < encoding.n_vocab:
        raise DataError(
            f"data.end_token={end_token} is no id of the tokenizer {encoding.name}, "
            f"which has {encoding.n_vocab:,} ids. Name the id that ends documents"
        )
    status = [(file.path, file.path.stat()) for file in files.files]
    identity = [
        f"{SCHEMA} {_VERSION} {config.source} {config.validation} {end_token}",
        fingerprint(encoding),
        *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in status),
        "" if files.ends is None else hashlib.sha256(files.ends.data).hexdigest(),
    ]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]", "_", config.name)
    path = data_cache_folder(config) / f"{name}-{digest}"
    build = partial(_seal, config, files, encoding, end_token, beat)
    build_once(path, config.path or "", build)
    store = open_store(path, encoding)

    def open_external(split: Split) -> FileTokens:
        runs = np.frombuffer(store.storage.read(f"{split}/{RUNS}"), "<i8")
        return FileTokens(
            files,
            runs.reshape(2, -1),
            store.num_tokens(split),
            token_dtype(encoding),
            store.checksums[checksum_file(split, "tokens")],
        )

    return Store(
        store.storage, store.manifest, encoding, store.checksums, open_external
    )


def _seal(
    config: DataConfig,
    files: TokenFiles,
    encoding: tiktoken.Encoding,
    end_token: int,
    beat: Callable[[], object],
    folder: Path,
) -> None:
    """Write the seal of some files into a folder."""
    scan = _Scan(files, encoding, end_token, config.validation)
    entries = {
        "tokenizer": config.tokenizer,
        "tokenizer_sha256": config.tokenizer_sha256,
        "tokenizer_fingerprint": fingerprint(encoding),
        "source": {"path": config.path, "validation": config.validation},
    }
    try:
        write_store(
            KeyValueStore(folder),
            scan.segments(beat),
            token_dtype(encoding),
            entries,
            runs=scan.runs,
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: cannot be written ({error}). Free space there, or name another "
            f"place with data.cache_dir"
        ) from error
    for split in SPLITS if config.validation else SPLITS[:1]:
        if not scan.num_documents[split]:
            total = sum(scan.num_documents.values())
            raise DataError(
                f"{config.path}: of {total} documents none falls to {split} with "
                f"data.validation={config.validation}. Give more text or another part"
            )


class _Scan:
    """One pass over the tokens, which divides them into documents and splits."""

    def __init__(
        self,
        files: TokenFiles,
        encoding: tiktoken.Encoding,
        end_token: int,
        validation: float,
    ):
        self._files = files
        self._encoding = encoding
        self._dtype = token_dtype(encoding)
        self._end_token = end_token
        self._validation = validation
        # The number of bytes of each token's text; -1 if the id has no token.
        self._num_bytes = _token_bytes(encoding)
        self._num_bytes[[encoding.eot_token, end_token]] = 0
        self._cut: int | None = None  # where the held-out end of one document begins
        if validation and self._has_one_document():
            self._cut = max(1, round(int(files.bounds[-1]) * (1 - validation)))
        self._is_held_out = False  # the document to which the next token belongs
        self._document = ""  # its id; "" if the next token begins a document
        self.num_documents = dict.fromkeys(SPLITS, 0)
        self._num_tokens = dict.fromkeys(SPLITS, 0)
        # The place in the files of a run's tokens, less their place in the split.
        self._shift: dict[Split, int | None] = dict.fromkeys(SPLITS)
        self._runs = {split: [np.zeros((2, 0), np.int64)] for split in SPLITS}

    def runs(self, split: Split) -> bytes:
        """Return the runs of a split as int64 [2, n] (reader.py)."""
        return np.concatenate(self._runs[split], axis=1).astype("<i8").tobytes()

    def segments(self, beat: Callable[[], object]) -> Iterator[StoreSegment]:
        """Yield all tokens, a few MB at a time."""
        total = int(self._files.bounds[-1])
        size = sum(f.num_tokens * f.dtype.itemsize for f in self._files.files)
        with Meter(size, "checking tokens") as meter:
            for start, tokens in self._blocks():
                beat()
                self._check_ids(start, tokens)
                yield self._segment(start, tokens)
                stop = start + len(tokens)
                meter.show(size * stop // total, stop)

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the joined tokens in blocks, each with its start."""
        for file, start in zip(self._files.files, self._files.bounds, strict=False):
            for first in range(0, file.num_tokens, _BLOCK_TOKENS):
                count = min(_BLOCK_TOKENS, file.num_tokens - first)
                offset = file.first_byte + first * file.dtype.itemsize
                tokens = np.fromfile(file.path, file.dtype, count, offset=offset)
                if len(tokens) != count:
                    raise DataError(f"{file.path}: became shorter while it was read")
                yield int(start) + first, tokens

    def _ends(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Return the ends of documents in a block, ascending without repetition."""
        stop = start + len(tokens)
        if (ends := self._files.ends) is None:
            found = np.flatnonzero(tokens == self._end_token) + 1
        else:
            first, last = np.searchsorted(ends, (start, stop), "right")
            found = ends[first:last] - start
        others = [stop] if stop == self._files.bounds[-1] else []
        if self._cut is not None and start < self._cut <= stop:
            others.append(self._cut)
        return np.unique(np.concatenate([found, np.array(others, np.int64) - start]))

    def _has_one_document(self) -> bool:
        """Return whether no document ends before all others do."""
        total = self._files.bounds[-1]
        for start, tokens in self._blocks():
            ends = start + self._ends(start, tokens)
            if len(ends):
                return ends[0] == total
        return True

    def _segment(self, start: int, tokens: np.ndarray) -> StoreSegment:
        """Divide a block into documents, and these into splits."""
        ends = self._ends(start, tokens)
        bounds = np.unique(np.concatenate([[0], ends, [len(tokens)]]))
        lengths = np.diff(bounds)
        has_end = np.ones(len(lengths), bool)
        has_end[-1] = len(ends) > 0 and ends[-1] == len(tokens)
        places = start + bounds[:-1]
        ids = self._ids(places)
        if self._document:
            ids[0] = self._document
        pairs = zip(ids, places, strict=True)
        is_held_out = np.array([self._holds_out(*pair) for pair in pairs])
        if self._document:
            is_held_out[0] = self._is_held_out
        self._document = "" if has_end[-1] else ids[-1]
        self._is_held_out = bool(is_held_out[-1])
        splits = {}
        num_bytes = {}
        for split in SPLITS:
            mask = is_held_out if split == "validation" else ~is_held_out
            chosen = tokens[np.repeat(mask, lengths)]
            num_bytes[split] = int(self._num_bytes[chosen].sum())
            self._add_runs(split, places[mask], lengths[mask])
            names = [ids[i].encode() for i in np.flatnonzero(mask & has_end)]
            self.num_documents[split] += len(names)
            splits[split] = SegmentSplit(
                tokens=chosen.astype(self._dtype),
                ends=np.cumsum(lengths[mask])[has_end[mask]],
                ids=np.frombuffer(b"".join(names), np.uint8),
                id_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
            )
        return StoreSegment(splits, {"bytes": num_bytes, "empty": 0, "bad": []})

    def _ids(self, places: np.ndarray) -> list[str]:
        """Return the id of each document, given its place in the joined files."""
        bounds = self._files.bounds
        files = np.searchsorted(bounds, places, "right") - 1
        names = [file.path.name for file in self._files.files]
        numbers = (places - bounds[files]).tolist()
        pairs = zip(files.tolist(), numbers, strict=True)
        return [f"{names[file]}:{number}" for file, number in pairs]

    def _holds_out(self, document: str, place: int) -> bool:
        """Return whether a document is held out."""
        if self._cut is not None:
            return place >= self._cut
        return split_of(document, self._validation) == "validation"

    def _add_runs(self, split: Split, places: np.ndarray, lengths: np.ndarray) -> None:
        """Record where the next tokens of a split lie in the joined files."""
        starts = self._num_tokens[split] + np.cumsum(lengths) - lengths
        shifts = places - starts
        last = self._shift[split]
        is_new = np.diff(shifts, prepend=shifts[:1] if last is None else last) != 0
        if last is None:
            is_new[:1] = True
        self._runs[split].append(np.stack([starts[is_new], places[is_new]]))
        self._num_tokens[split] += int(lengths.sum())
        if len(shifts):
            self._shift[split] = int(shifts[-1])

    def _check_ids(self, start: int, tokens: np.ndarray) -> None:
        """Raise DataError at the first id that the tokenizer does not have."""
        num_ids = len(self._num_bytes)
        is_known = (tokens >= 0) & (tokens < num_ids)
        if is_known.all():
            is_known = self._num_bytes[tokens] >= 0
        if is_known.all():
            return
        number = int(np.argmin(is_known))
        bounds = self._files.bounds
        file = int(np.searchsorted(bounds, start + number, "right")) - 1
        raise DataError(
            f"{self._files.files[file].path}: token {start + number - bounds[file]} is "
            f"{tokens[number]}, which is no id of the tokenizer {self._encoding.name} "
            f"({self._encoding.n_vocab:,} ids). Name the tokenizer of the files: "
            f"data.tokenizer=..."
        )


def _token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the number of bytes of each id's text, or -1 if the id has no token."""
    sizes = np.full(encoding.n_vocab, -1, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        sizes[rank] = len(token)
    for rank in encoding._special_tokens.values():
        sizes[rank] = len(decode_bytes(encoding, [rank]))
    return sizes
