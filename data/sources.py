"""The stores that a run reads: a single store, or the named stores of a mixture.

Text, and token files of other trainers, become stores at first use.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import tiktoken

from data.beginning import beginning_token
from data.config import TOKEN_FILES, DataConfig, Source, TokenFormat
from data.errors import DataError, MissingPackageError
from data.splits import Split
from data.storage import is_remote
from data.token_store.layout import MANIFEST
from data.token_store.store import Store, data_cache_folder, open_store
from data.tokenizer import load_tokenizer

# Opens the store of a config that reads text or token files, and makes it on first use.
# The second argument is called for each piece of them, to report progress.
TextStore = Callable[[DataConfig, Callable[[], object]], Store]


@dataclass(frozen=True)
class Sources:
    """Opened stores of one tokenizer.

    stores: the stores by name; a run's single store has the name `data.name` here, but
        not in `fingerprints`.
    cache: the folder of cached packing plans.
    sets: the named validation sets.
    """

    stores: Mapping[str, Store]
    cache: Path
    sets: Mapping[str, Store] = field(default_factory=dict)

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The tokenizer that all stores share."""
        return next(iter(self.stores.values())).encoding

    @property
    def has_many_documents(self) -> bool:
        """Whether there is more than one document to train on."""
        splits = (store.manifest["splits"] for store in self.stores.values())
        return sum(split["train"]["documents"] for split in splits) > 1

    @property
    def path(self) -> str:
        """The paths of all stores, for messages."""
        return ", ".join(store.path for store in self.stores.values())

    @property
    def fingerprint(self) -> str:
        """A single store's fingerprint, or a hash of all names and fingerprints."""
        if len(self.stores) == 1:
            return self.fingerprints["text"]
        text = " ".join(f"{name}={f}" for name, f in sorted(self.fingerprints.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def fingerprints(self) -> dict[str, str]:
        """Each store's fingerprint, by the store's name.

        A single store has the name `text`, whatever `data.name` is.
        """
        names = ["text"] if len(self.stores) == 1 else list(self.stores)
        stores = self.stores.values()
        return {n: s.fingerprint for n, s in zip(names, stores, strict=True)}

    @property
    def held_out(self) -> Split:
        """The split to evaluate on: `train` if the stores hold out no text."""
        return "validation" if self.num_tokens("validation") > 1 else "train"

    def validation_sets(self, by_source: bool) -> dict[str, "Sources"]:
        """Return the validation sets that are scored separately, by name.

        With `by_source`, each source of a mixture that has validation text is a set.
        """
        stores = self.stores if by_source and len(self.stores) > 1 else {}
        by_name = {n: s for n, s in stores.items() if s.num_tokens("validation") > 1}
        sets = by_name | dict(self.sets)
        return {name: Sources({name: s}, self.cache) for name, s in sets.items()}

    def num_tokens(self, split: Split) -> int:
        """Count the tokens of a split, including the end-of-text tokens."""
        return sum(store.num_tokens(split) for store in self.stores.values())

    def num_bytes(self, split: Split) -> int:
        """Count the bytes of a split's text, the denominator of bits per byte."""
        return sum(store.num_bytes(split) for store in self.stores.values())

    def text(self, split: Split, limit: int | None = None) -> bytes:
        """Decode a split, or its first `limit` bytes, store after store."""
        text = b""
        for store in self.stores.values():
            text += store.text(split, limit and limit - len(text))
        return text


def open_sources(
    config: DataConfig,
    text_store: TextStore,
    beat: Callable[[], object] = lambda: None,
    to_evaluate: bool = True,
) -> Sources:
    """Open the stores that a config names; `text_store` opens those made at first use.

    `beat` is called for each encoded piece of text, to report progress. `to_evaluate`
    says that validation text is required. Raises DataError if text or a store is
    missing or damaged, tokenizers differ, or required validation text is missing.
    """
    if config.source is Source.python:
        stores = {config.name: text_store(config, beat)}
    elif config.source in (Source.text, *TOKEN_FILES):
        with _errors_prefixed("data.path", config.path or ""):
            stores = {config.name: text_store(config, beat)}
    elif config.source is Source.tokens:
        stores = {config.name: _open_prepared("data.path", config.path or "")}
    else:
        stores = {n: _open_source(config, n, text_store, beat) for n in config.sources}
    if len({s.manifest["tokenizer_fingerprint"] for s in stores.values()}) > 1:
        names = ", ".join(f"{n}: {s.manifest['tokenizer']}" for n, s in stores.items())
        raise DataError(
            f"data.sources: their tokenizers differ ({names}). Prepare all of them "
            f"with the same tokenizer"
        )
    # The BOS token is no part of a tokenizer's fingerprint: some stores may lack it.
    encodings = [store.encoding for store in stores.values()]
    encoding = max(encodings, key=lambda e: beginning_token(e) != e.eot_token)
    stores = {n: replace(store, encoding=encoding) for n, store in stores.items()}
    sources = Sources(stores, data_cache_folder(config))
    if to_evaluate and (count := sources.num_tokens("validation")) < 2:
        is_made = config.source is Source.python or config.source is Source.text
        is_made |= config.reads_token_files
        key = "data.validation" if is_made else "python -m data.prepare ... validation"
        raise DataError(
            f"{sources.path}: validation has {count} tokens, but a target needs 2. "
            f"Give more text, or hold more of it out: {key}=..."
        )
    return sources


def open_sets(
    sources: Sources,
    config: DataConfig,
    paths: Mapping[str, str],
    text_store: TextStore,
    beat: Callable[[], object] = lambda: None,
    table: str = "eval.sets",
) -> Sources:
    """Return the sources with named validation sets added.

    Each path is a token store or, if the config reads text or token files, what its
    `data.path` may name. `text_store` and `beat` are as in `open_sources`. `table` is
    the config key of `paths`. Raises DataError if a set is missing, damaged, too short
    or has another tokenizer.
    """
    sets = {}
    manifest = next(iter(sources.stores.values())).manifest
    for name, path in paths.items():
        is_store = is_remote(path) or (Path(path) / MANIFEST).exists()
        with _errors_prefixed(f"{table}.{name}.path", path):
            source = Source.text if config.source is Source.python else config.source
            if source in (Source.text, *TOKEN_FILES) and not is_store:
                overrides = {"name": name, "path": path, "validation": 0.0}
                set_config = replace(config, source=source, **overrides)
                store = text_store(set_config, beat)
            else:
                store = open_store(path)
        if store.manifest["tokenizer_fingerprint"] != manifest["tokenizer_fingerprint"]:
            raise DataError(
                f"{table}.{name}: {path} has the tokenizer "
                f"{store.manifest['tokenizer']}, the run's is {manifest['tokenizer']}. "
                f"Prepare it with the run's tokenizer"
            )
        validation_set = Sources({name: store}, sources.cache)
        if validation_set.num_tokens(validation_set.held_out) < 2:
            raise DataError(f"{table}.{name}: {path} has no token to predict")
        sets[name] = replace(store, encoding=sources.encoding)
    return replace(sources, sets=sets)


def encoding_of(config: DataConfig) -> tiktoken.Encoding:
    """Load a config's tokenizer without building a store.

    Raises DataError if the tokenizer or a store is missing or damaged.
    """
    if config.source in (Source.python, Source.text) or config.reads_token_files:
        return load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    if config.source is Source.tokens:
        return _open_prepared("data.path", config.path or "").encoding
    name, source = next(iter(config.sources.items()))
    return _open_prepared(f"data.sources.{name}.path", source.path).encoding


def _open_source(
    config: DataConfig, name: str, text_store: TextStore, beat: Callable[[], object]
) -> Store:
    """Open the store or the token files of a mixture's source."""
    source = config.sources[name]
    key = f"data.sources.{name}.path"
    if source.format is TokenFormat.store:
        return _open_prepared(key, source.path)
    overrides = {"name": name, "path": source.path, "sources": {}}
    kind = Source(source.format.value)
    with _errors_prefixed(key, source.path):
        return text_store(replace(config, source=kind, **overrides), beat)


def _open_prepared(key: str, path: str) -> Store:
    """Open a store that `python -m data.prepare` made; `key` names it in errors."""
    with _errors_prefixed(key, path):
        return open_store(path)


@contextmanager
def _errors_prefixed(key: str, path: str) -> Iterator[None]:
    """Prefix a DataError with the config key and the path that it concerns."""
    try:
        yield
    except MissingPackageError:
        raise
    except DataError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DataError(f"{key} = {path}\n    {reason}") from error
