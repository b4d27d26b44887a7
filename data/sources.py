"""The stores that a run reads: one, or a mixture of several by name."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import tiktoken

from data.config import DataConfig, Source
from data.errors import DataError
from data.storage import is_remote
from data.text.files import Split
from data.token_store.cached import cache_dir, cached_store
from data.token_store.store import Store, open_store
from data.token_store.writer import MANIFEST
from data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Sources:
    """Open stores with one tokenizer. A store that is alone bears `data.name`."""

    stores: Mapping[str, Store]
    cache: Path  # the folder of cached results about these stores
    sets: Mapping[str, Store] = field(default_factory=dict)  # only to evaluate on

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
            return self.fingerprints["text"]
        text = " ".join(f"{name}={f}" for name, f in sorted(self.fingerprints.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def fingerprints(self) -> dict[str, str]:
        """The content's hash of each store by name; of one that is alone, as `text`."""
        alone = len(self.stores) == 1
        return {"text" if alone else n: s.fingerprint for n, s in self.stores.items()}

    @property
    def held_out(self) -> Split:
        """The split to evaluate on: of a store that holds nothing out, all of it."""
        return "validation" if self.num_tokens("validation") > 1 else "train"

    def validation_sets(self, by_source: bool) -> dict[str, "Sources"]:
        """Return what to evaluate on besides all sources together, by name.

        The named sets; of several sources each that holds text out, if `by_source`.
        """
        stores = self.stores if by_source and len(self.stores) > 1 else {}
        named = {n: s for n, s in stores.items() if s.num_tokens("validation") > 1}
        sets = named | dict(self.sets)
        return {name: Sources({name: s}, self.cache) for name, s in sets.items()}

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


def open_sources(
    config: DataConfig,
    beat: Callable[[], object] = lambda: None,
    to_evaluate: bool = True,
) -> Sources:
    """Open, and for text build on first use, what a config names.

    `beat` is called for each piece of text that is encoded meanwhile. Sources that are
    opened `to_evaluate` need validation text. Raises DataError if something is missing
    or damaged, or tokenizers differ.
    """
    if config.source is Source.python:
        stores = {config.name: cached_store(config, beat)}
    elif config.source is Source.text:
        with _said_of("data.path", config.path or ""):
            stores = {config.name: cached_store(config, beat)}
    else:
        stores = {name: _open(config, name) for name in _names(config)}
    if len({s.manifest["tokenizer_fingerprint"] for s in stores.values()}) > 1:
        names = ", ".join(f"{n}: {s.manifest['tokenizer']}" for n, s in stores.items())
        raise DataError(
            f"data.sources: their tokenizers differ ({names}). Prepare all of them "
            f"with one"
        )
    sources = Sources(stores, cache_dir(config))
    if to_evaluate and (count := sources.num_tokens("validation")) < 2:
        text = config.source in (Source.python, Source.text)
        key = "data.validation" if text else "python -m data.prepare ... validation"
        raise DataError(
            f"{sources.path}: validation has {count} tokens, but a target needs 2. "
            f"Give more text, or hold more of it out: {key}=..."
        )
    return sources


def open_sets(
    sources: Sources,
    config: DataConfig,
    paths: Mapping[str, str],
    beat: Callable[[], object] = lambda: None,
    table: str = "eval.sets",
) -> Sources:
    """Add named validation sets to what a config names, encoded by its tokenizer.

    Each is a token store, or, if the config reads text, a text file or a folder of
    them; `beat` as in `open_sources`. `table` is the key that names them. Raises
    DataError if one is missing or damaged, too short, or has another tokenizer.
    """
    sets = {}
    manifest = next(iter(sources.stores.values())).manifest
    for name, path in paths.items():
        stored = is_remote(path) or (Path(path) / MANIFEST).exists()
        with _said_of(f"{table}.{name}.path", path):
            if config.source in (Source.python, Source.text) and not stored:
                of_set = {"name": name, "path": path, "validation": 0.0}
                text_config = replace(config, source=Source.text, **of_set)
                store = cached_store(text_config, beat)
            else:
                store = open_store(path)
        if store.manifest["tokenizer_fingerprint"] != manifest["tokenizer_fingerprint"]:
            raise DataError(
                f"{table}.{name}: {path} has the tokenizer "
                f"{store.manifest['tokenizer']}, the run's is {manifest['tokenizer']}. "
                f"Prepare it with that one"
            )
        alone = Sources({name: store}, sources.cache)
        if alone.num_tokens(alone.held_out) < 2:
            raise DataError(f"{table}.{name}: {path} has no token to predict")
        sets[name] = store
    return replace(sources, sets=sets)


def encoding_of(config: DataConfig) -> tiktoken.Encoding:
    """Load the tokenizer of what a config names, without building anything.

    Raises DataError if it is missing or damaged.
    """
    if config.source in (Source.python, Source.text):
        return load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    return _open(config, _names(config)[0]).encoding


def _names(config: DataConfig) -> list[str]:
    return [config.name] if config.source is Source.tokens else [*config.sources]


def _open(config: DataConfig, name: str) -> Store:
    """Open one of the stores that a config names."""
    key, path = "data.path", config.path or ""
    if config.source is Source.mixture:
        key, path = f"data.sources.{name}.path", config.sources[name].path
    with _said_of(key, path):
        return open_store(path)


@contextmanager
def _said_of(key: str, path: str) -> Iterator[None]:
    """Put the key that names the data before what is wrong with it."""
    try:
        yield
    except DataError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DataError(f"{key} = {path}\n    {reason}") from error
