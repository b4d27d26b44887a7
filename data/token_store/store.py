"""A token store: text that is encoded once and read at random.

Writing the manifest commits a store, so a store is complete or does not exist. Each
chunk's checksum is checked when the chunk is read, and damage raises DataError.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.config import PUBLISHED, DataConfig
from data.encoding import BYTES, decode_bytes, fingerprint
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.machine import cache_folder
from data.names import checked_name
from data.splits import SPLITS, Split
from data.storage import local_path
from data.token_store.layout import (
    ARRAYS,
    MANIFEST,
    MANIFEST_DIGEST,
    RANKS,
    RUNS,
    SCHEMA,
    checksum_file,
)
from data.token_store.reader import ExternalTokens, TokenArray
from data.tokenizer import load_tokenizer, tokenizer_from_bytes


@dataclass(frozen=True)
class Store:
    """An opened token store."""

    storage: KeyValueStore
    manifest: Mapping[str, Any]
    encoding: tiktoken.Encoding
    # The chunks' checksums by file name.
    checksums: Mapping[str, np.ndarray]
    # Opens the tokens of a split that lie in files of another program.
    open_external: Callable[[Split], ExternalTokens] | None = None
    _splits: dict[str, TokenArray] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path or URL of the store."""
        return self.storage.location

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and offsets, equal for stores of equal content."""
        return self.manifest["fingerprint"]

    def num_tokens(self, split: Split) -> int:
        """Count a split's tokens, including the end-of-text tokens."""
        return self.manifest["splits"][split]["tokens"]

    def num_bytes(self, split: Split) -> int:
        """Count the bytes of a split's text, the denominator of bits per byte."""
        return self.manifest["splits"][split]["bytes"]

    def split(self, split: Split) -> TokenArray:
        """Return a split, opened on first use; raise DataError if it is damaged."""
        if split not in self._splits:
            self._splits[split] = self.open(split)
        return self._splits[split]

    def open(self, split: Split, keep: bool = True) -> TokenArray:
        """Open a split; with `keep`, small arrays are read into memory."""
        counts = self.manifest["splits"][split]
        external = None
        if self.open_external is not None:
            external = self.open_external(split)
        elif f"{split}/{RUNS}" in self.manifest["files"]:
            raise DataError(
                f"{self.path}: holds only checksums of "
                f"{self.manifest['source']['path']}. Name these files, and their "
                f"format as data=..., instead of this folder"
            )
        return TokenArray(
            self.storage,
            split,
            num_documents=counts["documents"],
            num_tokens=counts["tokens"],
            digests=self.manifest["digests"][split],
            checksums={
                name: self.checksums[checksum_file(split, name)] for name in ARRAYS
            },
            keep=keep,
            external=external,
        )

    def text(self, split: Split, limit: int | None = None) -> bytes:
        """Decode a split, or its first `limit` bytes, without end-of-text tokens."""
        tokens = self.split(split)
        texts = []
        size = 0
        for start in range(0, len(tokens), 2**20):
            if limit is not None and size >= limit:
                break
            ids = tokens.read(start, min(start + 2**20, len(tokens)))
            ids = ids[ids != self.encoding.eot_token]
            texts.append(decode_bytes(self.encoding, ids))
            size += len(texts[-1])
        return b"".join(texts)[:limit]


def data_cache_folder(config: DataConfig) -> Path:
    """Return the folder of stores that are built on first use, and of packing plans."""
    if config.cache_dir:
        return local_path(config.cache_dir)
    return cache_folder() / "stores"


def open_store(path: Path | str, encoding: tiktoken.Encoding | None = None) -> Store:
    """Open the store at a path or URL; without `encoding`, load the store's own.

    Raises DataError if there is no complete store, one of its small files is damaged,
    or the store was made with another tokenizer.
    """
    storage = KeyValueStore(path)
    file = f"{storage}/{MANIFEST}"
    remedy = (
        f"Delete {storage} and prepare it again (python -m data.prepare input=... "
        f"output={storage}), or bring it back from a copy"
    )
    try:
        content = storage.read(MANIFEST)
        digest = storage.read(MANIFEST_DIGEST)
    except FileNotFoundError as error:
        raise _no_store_error(storage, error) from error

    def check(name: str, content: bytes, digest: str) -> None:
        if hashlib.sha256(content).hexdigest() != digest:
            raise DataError(
                f"{storage}/{name}: is damaged: its SHA-256 is different. {remedy}"
            )

    check(MANIFEST, content, digest.decode(errors="replace").strip())
    try:
        manifest = dict(json.loads(content))
        files = manifest.get("files", {}).items()
        digests = {checked_name(name): digest for name, digest in files}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{file}: is not a token store's manifest. {remedy}") from None
    if manifest.get("schema") != SCHEMA:
        raise DataError(
            f"{file}: its schema is {manifest.get('schema')}, but this version reads "
            f"{SCHEMA}. {remedy}"
        )
    required = {checksum_file(split, name) for split in SPLITS for name in ARRAYS}
    if missing := required - digests.keys():
        raise DataError(
            f"{file}: does not list {min(missing)}, and this version reads only stores "
            f"with the checksums of all chunks. {remedy}"
        )
    checksums = dict[str, np.ndarray]()
    try:
        for name, digest in digests.items():
            check(name, content := storage.read(name), digest)
            if name.endswith(".crc32c"):
                checksums[name] = np.frombuffer(content, "<u4")
    except FileNotFoundError as error:
        raise DataError(f"{error}: is not there. {remedy}") from error
    if encoding is None and RANKS in digests:
        encoding = tokenizer_from_bytes(f"{storage}/{RANKS}", storage.read(RANKS))
    elif encoding is None:
        if (name := manifest.get("tokenizer")) not in (BYTES, *PUBLISHED):
            raise DataError(f"{file}: has the unknown tokenizer {name}. {remedy}")
        encoding = load_tokenizer(name)
    if fingerprint(encoding) != manifest["tokenizer_fingerprint"]:
        raise DataError(
            f"{file}: its tokens were made with another tokenizer named "
            f"{manifest['tokenizer']}. Use that one, or delete and rebuild the store"
        )
    return Store(storage, manifest, encoding, checksums)


def _no_store_error(storage: KeyValueStore, error: FileNotFoundError) -> DataError:
    """Return the error for a location without a manifest, which may hold anything."""
    prepare = f"python -m data.prepare input=... output={storage}"
    if storage.path is not None and not storage.path.exists():
        return DataError(
            f"{storage}: there is no such folder. Correct the path, or make a token "
            f"store there: {prepare}"
        )
    if storage.path is not None and not storage.path.is_dir():
        return DataError(
            f"{storage}: is a file and no token store. Train on text with data=text, "
            f"or make a store of it: python -m data.prepare input={storage} output=..."
        )
    return DataError(
        f"{error}: is not there, so {storage} is no complete token store. If it holds "
        f"text, use data=text. If data.prepare was interrupted, the same command "
        f"completes the store. If you made none there, correct the path"
    )
