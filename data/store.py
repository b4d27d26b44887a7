"""A token store: text that was encoded once and is read at random ever after.

`prepare` gives the store that belongs to a config, building it on first use. The
manifest's presence is the commit, so a store is whole or not there; every chunk's
checksum is checked when it is read; what is damaged is a `DataError`, never data.
"""

import contextlib
import glob
import gzip
import hashlib
import json
import logging
import lzma
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiktoken

from data import tokenizer
from data.config import DataConfig
from data.corpus import Split, find_corpus
from data.errors import DataError
from data.reader import TokenArray
from data.writer import MANIFEST, SCHEMA, write_store

_ABANDONED_AFTER_S = 24 * 3600

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """An opened token store."""

    path: Path
    manifest: Mapping[str, Any]
    encoding: tiktoken.Encoding
    _splits: dict[str, TokenArray] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def fingerprint(self) -> str:
        """The hash of all tokens and offsets: equal in stores of equal content."""
        return self.manifest["fingerprint"]

    def num_tokens(self, split: Split) -> int:
        """Count a split's tokens, the documents' ends among them."""
        return self.manifest["splits"][split]["tokens"]

    def num_bytes(self, split: Split) -> int:
        """Count the bytes of a split's text: what bits per byte are divided by."""
        return self.manifest["splits"][split]["bytes"]

    def split(self, split: Split) -> TokenArray:
        """Open a split, on first use.

        Raises:
            DataError: an array is missing or damaged.
        """
        if split not in self._splits:
            self._splits[split] = TokenArray(self.path / split)
        return self._splits[split]

    def text(self, split: Split, limit: int | None = None) -> bytes:
        """Decode a split, or its first `limit` bytes, without the documents' ends."""
        tokens, parts, size = self.split(split), [], 0
        for start in range(0, len(tokens), 2**20):
            if limit is not None and size >= limit:
                break
            ids = tokens.read(start, min(start + 2**20, len(tokens)))
            ids = ids[ids != self.encoding.eot_token]
            parts.append(tokenizer.decode_bytes(self.encoding, ids))
            size += len(parts[-1])
        return b"".join(parts)[:limit]


def open_store(path: Path, encoding: tiktoken.Encoding | None = None) -> Store:
    """Open the store at `path`, loading the tokenizer that it names if none is given.

    Raises:
        DataError: there is no whole store, or it was made with another tokenizer.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: cannot be read ({error}), so {path} is no whole token store. "
            f"Delete that folder; it is built again on the next start"
        ) from error
    if manifest.get("schema") != SCHEMA:
        raise DataError(
            f"{file}: its schema is {manifest.get('schema')}, but this version reads "
            f"{SCHEMA}. Delete {path}; it is built again on the next start"
        )
    if encoding is None:
        encoding = tokenizer.load_tokenizer(
            manifest["tokenizer"], manifest["tokenizer_sha256"]
        )
    if tokenizer.fingerprint(encoding) != manifest["tokenizer_fingerprint"]:
        raise DataError(
            f"{file}: its tokens were made with another tokenizer of the name "
            f"{manifest['tokenizer']}. Name that one, or delete {path} to build it anew"
        )
    return Store(path, manifest, encoding)


def prepare(config: DataConfig) -> Store:
    """Open the store of a config, building it first where there is none yet.

    The folder's name holds a hash of what the store is made of, so that a changed
    source makes another store. It is built beside its place and renamed into it: any
    number of processes may prepare at once, and one that dies leaves no store.

    Raises:
        DataError: the text or the tokenizer is missing, or the store is damaged.
        ValueError: a rank file is named as tokenizer without its hash.
    """
    encoding = tokenizer.load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    corpus = find_corpus(config)
    identity = f"{SCHEMA} {corpus.identity()} {tokenizer.fingerprint(encoding)}"
    name = re.sub(r"[^\w.-]", "_", config.name)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = _cache_dir(config) / f"{name}-{digest}"
    if not (path / MANIFEST).exists():
        _log.info("preparing %s from %s", path, corpus.root)
        started = time.monotonic()
        building = path.with_name(f"{path.name}.building-{secrets.token_hex(4)}")
        _remove_abandoned(path)
        try:
            _make_folder(building)
            write_store(
                building, corpus, encoding, config.tokenizer, config.tokenizer_sha256
            )
            _move_into_place(building, path)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        _log.info("prepared %s in %.1f s", path, time.monotonic() - started)
    return open_store(path, encoding)


def compression_bits_per_byte(text: bytes) -> dict[str, float]:
    """Compress text with gzip -9 and xz -9: the bar that a model should pass.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("text=b'': has no bits per byte; give at least one byte")
    sizes = {
        "gzip": len(gzip.compress(text, 9, mtime=0)),
        "xz": len(lzma.compress(text, preset=9)),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _cache_dir(config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "longhaul" / "stores"


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{path.parent}: token stores cannot be kept there ({error}). Name a "
            f"folder that can be written with data.cache_dir"
        ) from error


def _move_into_place(building: Path, path: Path) -> None:
    """Rename a finished store to `path`, unless another process was faster."""
    for _ in range(3):
        with contextlib.suppress(OSError):
            building.rename(path)
            return
        if (path / MANIFEST).exists():
            return
        # What lies there has lost its manifest: it is no store.
        broken = path.with_name(f"{path.name}.building-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    raise DataError(f"{path}: cannot be replaced. Delete it and start again")


def _remove_abandoned(path: Path) -> None:
    """Remove what processes that died while they built this store left behind."""
    for building in path.parent.glob(f"{glob.escape(path.name)}.building-*"):
        with contextlib.suppress(OSError):
            if time.time() - building.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(building)
