"""Cached token stores of text that is encoded on first use."""

import contextlib
import glob
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data.config import DataConfig, Source
from data.encoding import fingerprint
from data.key_value_store import KeyValueStore
from data.storage import created_atomically, remove_tree
from data.text.corpus import find_corpus
from data.text.files import Format
from data.text.records import ReadSettings, separator_of, text_field_of
from data.token_store.build import build_store, encoding_settings, make_folder
from data.token_store.layout import MANIFEST, SCHEMA, SKIPPED
from data.token_store.store import Store, data_cache_folder, open_store
from data.tokenizer import load_tokenizer

_ABANDONED_AFTER_S = 24 * 3600

_log = logging.getLogger(__name__)


def cached_store(
    config: DataConfig,
    formats: Sequence[Format],
    beat: Callable[[], object] = lambda: None,
) -> Store:
    """Open the store of a config, and build it first if it does not exist.

    The name of the store's folder contains a hash of the text files, tokenizer and
    settings, so a change of any of them makes another store. The store is built in a
    temporary folder, which is then renamed. Therefore any number of processes may build
    it at once, and a process that dies leaves no incomplete store. `beat` is called for
    each encoded piece of text. Raises DataError if the text or the tokenizer is
    missing, or the store is damaged.
    """
    encoding = load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    corpus = find_corpus(config)
    read_settings = ReadSettings(
        text_field=text_field_of(config.text_field),
        text_separator=separator_of(config.text_separator),
        keep_invalid_utf8=config.source is Source.python,
        format=config.format,
    )
    settings = encoding_settings(config, read_settings)
    identity = f"{SCHEMA} {corpus.identity()} {fingerprint(encoding)}"
    if config.source is Source.text:
        identity += f" by content, {config.on_error}, {config.format}"
        identity += f", {config.text_field}"
        if len(read_settings.text_fields) > 1:
            identity += f", {config.text_separator!a}"
    name = re.sub(r"[^\w.-]", "_", config.name)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = data_cache_folder(config) / f"{name}-{digest}"

    def build(folder: Path) -> None:
        used = corpus
        if config.source is Source.text:
            used = corpus.classified(read_settings, formats, settings.skip_bad, beat)
            if settings.skip_bad:
                used = used.without_bad_files(beat)
        parts = folder / "parts"
        parts.mkdir()
        build_store(KeyValueStore(folder), used, settings, encoding, parts, beat=beat)
        shutil.rmtree(parts)

    build_once(path, corpus.root, build)
    store = open_store(path, encoding)
    _warn_of_skipped(store)
    return store


def build_once(path: Path, source: str, build: Callable[[Path], None]) -> None:
    """Build the store at a path in the cache, unless it is there.

    `build` receives a temporary folder, which is then renamed. `source` is what the
    store is made of, for the log. Raises DataError if the folder cannot be made.
    """
    if (path / MANIFEST).exists():
        return
    remove_tree(path)  # an incomplete store
    _log.info("preparing %s from %s", path, source)
    start_s = time.monotonic()
    _remove_abandoned(path)
    with created_atomically(path) as partial:
        setting = "data.cache_dir or the variable XDG_CACHE_HOME"
        make_folder(partial, path.parent, setting)
        build(partial)
    _log.info("prepared %s in %.1f s", path, time.monotonic() - start_s)


def _warn_of_skipped(store: Store) -> None:
    """Log at each start what `data.on_error=skip` has left out."""
    if left_out := store.manifest["source"].get("left_out"):
        files = [*left_out]
        size = sum(left_out.values())
        listed = ", ".join(files[:5]) + ", ..." * (len(files) > 5)
        message = "left out %d files that cannot be read, %d bytes in all: %s"
        _log.warning(f"data.on_error=skip {message}", len(files), size, listed)
    if count := store.manifest["skipped_records"]:
        message = "data.on_error=skip left out %d bad records: %s/%s"
        _log.warning(message, count, store.path, SKIPPED)


def _remove_abandoned(path: Path) -> None:
    """Remove day-old temporary folders of processes that died while building `path`."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.building-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(partial)
