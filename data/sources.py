"""The stores that a run reads: one, or a mixture of several by name."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from data.config import DataConfig, Source
from data.errors import DataError
from data.text.files import Split
from data.token_store.build import cache_dir, cached_store
from data.token_store.store import Store, open_store
from data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Sources:
    """Open stores with one tokenizer. A store that is alone bears `data.name`."""

    stores: Mapping[str, Store]
    cache: Path  # of what is worked out from them

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The tokenizer of all."""
        return next(iter(self.stores.values())).encoding

    @property
    def path(self) -> str:
        """Their paths."""
        return ", ".join(store.path for store in self.stores.values())

    @property
    def fingerprint(self) -> str:
        """The content's hash: of one store its own, else of all with their names."""
        if len(self.stores) == 1:
            return next(iter(self.stores.values())).fingerprint
        text = " ".join(f"{name}={f}" for name, f in sorted(self.fingerprints.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def fingerprints(self) -> dict[str, str]:
        """The content's hash of each store by name; of one that is alone, as `text`."""
        if len(self.stores) == 1:
            return {"text": self.fingerprint}
        return {name: store.fingerprint for name, store in self.stores.items()}

    def num_tokens(self, split: Split) -> int:
        """Count the tokens of a split, the documents' ends among them."""
        return sum(store.num_tokens(split) for store in self.stores.values())

    def num_bytes(self, split: Split) -> int:
        """Count the bytes of a split's text: what bits per byte are divided by."""
        return sum(store.num_bytes(split) for store in self.stores.values())

    def text(self, split: Split, limit: int | None = None) -> bytes:
        """Decode a split, or its first `limit` bytes, store after store."""
        text = b""
        for store in self.stores.values():
            text += store.text(split, limit and limit - len(text))
        return text


def open_sources(config: DataConfig) -> Sources:
    """Open, and for text build on first use, what a config names.

    Raises:
        DataError: something is missing or damaged, or tokenizers differ, or there is
            no text to evaluate on.
    """
    if config.source in (Source.python, Source.text):
        stores = {config.name: cached_store(config)}
    else:
        stores = {name: open_store(path) for name, path in _paths(config).items()}
    if len({s.manifest["tokenizer_fingerprint"] for s in stores.values()}) > 1:
        names = ", ".join(f"{n}: {s.manifest['tokenizer']}" for n, s in stores.items())
        raise DataError(
            f"data.sources: their tokenizers differ ({names}). Prepare all of them "
            f"with one"
        )
    sources = Sources(stores, cache_dir(config))
    if (count := sources.num_tokens("validation")) < 2:
        raise DataError(
            f"{sources.path}: validation has {count} tokens, but a target needs 2. "
            f"Give more text, or hold more of it out with validation=..."
        )
    return sources


def encoding_of(config: DataConfig) -> tiktoken.Encoding:
    """Load the tokenizer of what a config names, without building anything.

    Raises:
        DataError: it is missing or damaged.
    """
    if config.source in (Source.python, Source.text):
        return load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    return open_store(next(iter(_paths(config).values()))).encoding


def _paths(config: DataConfig) -> dict[str, str]:
    if config.source is Source.tokens:
        return {config.name: config.path or ""}
    return {name: source.path for name, source in config.sources.items()}
