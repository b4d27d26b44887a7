"""Build token stores: encode the units of a corpus and assemble the parts.

`prepare_store` builds what `python -m data.prepare` asks for, and continues a
killed preparation. token_store/cached.py builds stores of text on first use.
"""

import collections
import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import tiktoken

from data.config import DataConfig, FormatName, OnError
from data.encoding import fingerprint
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.machine import available_memory, cache_folder, usable_cores
from data.prepare_config import PrepareConfig
from data.splits import SPLITS
from data.storage import check_regular, local_path
from data.text.corpus import Corpus
from data.text.files import Format
from data.text.find import find_files
from data.text.plain_text import TEXT
from data.text.records import ReadSettings, separator_of, text_field_of
from data.text.streams import USUAL_WINDOW_BYTES
from data.token_store.encode import encode_tasks, encoded_part_path, make_tasks
from data.token_store.layout import MANIFEST, SCHEMA
from data.token_store.parts import (
    EncodingSettings,
    StoreSegment,
    read_part,
    token_dtype,
)
from data.token_store.progress import Meter
from data.token_store.store import Store, open_store
from data.token_store.writer import write_store
from data.tokenizer import load_tokenizer, tokenizer_to_bytes
from data.tokenizer_folder import digest_of

_WORKER_BYTES = 2**29  # memory of a worker, without the window of a zstd file
# Stores record a hash of their input that leaves out these formats if a file's name
# implies them. Newer formats are part of the hash.
_IMPLIED_BY_NAME = (FormatName.lines, FormatName.parquet, FormatName.arrow)
_UNFINISHED = "unfinished"  # a key in a store that is being written

_log = logging.getLogger(__name__)


def prepare_store(config: PrepareConfig, formats: Sequence[Format]) -> Store:
    """Open the store that a config names; build it first if it does not exist.

    Encoded parts stay in a work folder until the store is complete, so repeating the
    command continues a killed preparation. The store's bytes depend on the input and
    the config alone.

    Raises DataError if the input cannot be read or has bad records. Also raises it if
    the output cannot be written, is no store of this input and config, or is being
    prepared by another process.
    """
    assert config.output, "checked by the command"
    encoding = load_tokenizer(config.tokenizer, config.tokenizer_sha256)
    read_settings = ReadSettings(
        text_field=text_field_of(config.text_field),
        text_separator=separator_of(config.text_separator),
        id_field=config.id_field,
        keep_invalid_utf8=config.keep_invalid_utf8,
        max_record_bytes=config.max_record_bytes,
        format=config.format,
    )
    settings = encoding_settings(config, read_settings)
    files = tuple(find_files(config.inputs, config.pattern))
    corpus = Corpus(" ".join(config.inputs), files, config.validation)
    corpus = corpus.classified(read_settings, formats, settings.skip_bad)
    if corpus.left_out:
        paths = ", ".join(file.path for file in corpus.left_out[:5])
        message = "on_error=skip left out %d files that cannot be read: %s"
        _log.warning(message, len(corpus.left_out), paths)
    storage = KeyValueStore(config.output)
    with _locked(_work_folder(config, storage)) as folder:
        if is_built := storage.has(MANIFEST):
            _log.info("%s: is there already", storage)
        else:
            names = set(storage.names())
            if names and _UNFINISHED not in names:
                raise DataError(f"{storage}: is no token store. Name another output")
            storage.write(_UNFINISHED, b"")
            for name in names - {_UNFINISHED}:
                storage.write(name, None)
            build_store(storage, corpus, settings, encoding, folder, config.workers)
        storage.write(_UNFINISHED, None)
        store = open_store(storage.location, encoding)
        if is_built and store.manifest["made_of"] != input_hash(corpus, settings):
            raise DataError(
                f"{storage}: is a store of other input or settings. Name "
                f"another output, or delete it"
            )
        for part in folder.glob("*.part*"):
            part.unlink()
    return store


def build_store(
    storage: KeyValueStore,
    corpus: Corpus,
    settings: EncodingSettings,
    encoding: tiktoken.Encoding,
    part_folder: Path,
    workers: int | None = None,
    beat: Callable[[], object] = lambda: None,
) -> None:
    """Encode a corpus into an empty folder; the manifest, written last, commits it.

    Encoded parts are written to `part_folder`; those of an earlier attempt are reused.
    By default there is one worker process for each core. `beat` is called repeatedly
    while parts are encoded, and for each part that is added to the store. Raises
    DataError if text cannot be read, the store cannot be written, or a split is empty.
    """
    tasks = make_tasks(corpus.units())
    with Meter(sum(task.size for task in tasks)) as meter:

        def show(size: int, tokens: int) -> None:
            meter.show(size, tokens)
            beat()

        workers = _workers_that_fit(corpus, workers or usable_cores())
        encode_tasks(tasks, part_folder, settings, encoding, workers, report=show)
    left_out = {file.path: file.size for file in corpus.left_out}
    source = {"path": corpus.root, "validation": corpus.validation}
    source |= {"left_out": left_out} if left_out else {}
    manifest_entries = {
        "tokenizer": settings.tokenizer,
        "tokenizer_sha256": settings.tokenizer_sha256,
        "tokenizer_fingerprint": fingerprint(encoding),
        "source": source,
        "made_of": input_hash(corpus, settings),
    }
    paths = [encoded_part_path(part_folder, task, settings) for task in tasks]
    segments = _read_segments(paths, corpus, settings.skip_bad, beat)
    try:
        ranks = tokenizer_to_bytes(settings.tokenizer)
        write_store(storage, segments, token_dtype(encoding), manifest_entries, ranks)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{storage}: cannot be written ({error}). Free space there, or name "
            f"another place"
        ) from error


def _workers_that_fit(corpus: Corpus, workers: int) -> int:
    """Return the number of workers that have memory for the windows of zstd files."""
    file = max(corpus.files, key=lambda file: file.window_bytes)
    available_bytes = available_memory()
    if file.window_bytes <= USUAL_WINDOW_BYTES or available_bytes is None:
        return workers
    fitting = max(1, available_bytes // (file.window_bytes + _WORKER_BYTES))
    message = "%s: decompressing it needs %.1f GiB of memory in each worker, and %.1f "
    message += "GiB are available, so there are at most %d workers"
    gib = file.window_bytes / 2**30
    available_gib = available_bytes / 2**30
    _log.warning(message, file.path, gib, available_gib, fitting)
    return min(workers, fitting)


def input_hash(corpus: Corpus, settings: EncodingSettings) -> str:
    """Return a hash of the settings, and of every file's name, size and format.

    Stores record the hash, so it must not change. It leaves out a format that is not
    set, the format of a text, and formats that a file's name implies.
    """
    values = asdict(settings)
    if settings.reading.format is None:
        del values["reading"]["format"]
    if len(settings.reading.text_fields) == 1:
        del values["reading"]["text_separator"]
    files = []
    for file in corpus.files:
        is_implied = file.format == TEXT or (
            file.format.name in _IMPLIED_BY_NAME
            and file.format.is_named(file.name)
            and ".jsonlines" not in file.name.lower()
        )
        entry = (file.name, file.size)
        files.append(entry if is_implied else (*entry, file.format.name))
    text = json.dumps([SCHEMA, values, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def encoding_settings(
    config: DataConfig | PrepareConfig, read_settings: ReadSettings
) -> EncodingSettings:
    """Return the settings that determine the tokens of a text."""
    return EncodingSettings(
        config.tokenizer,
        config.tokenizer_sha256 or digest_of(config.tokenizer),
        reading=read_settings,
        validation=config.validation,
        skip_bad=config.on_error is OnError.skip,
    )


def _read_segments(
    paths: list[Path], corpus: Corpus, skip_bad: bool, beat: Callable[[], object]
) -> Iterator[StoreSegment]:
    """Yield all segments; raise DataError at a bad record, or if a split is empty."""
    num_documents = collections.Counter()
    num_bad = 0
    for path in paths:
        beat()
        for segment in read_part(path):
            bad = segment.notes["bad"]
            if bad and not skip_bad:  # an earlier attempt skipped bad records
                file, location, reason = bad[0]
                raise DataError(
                    f"{file}, {location}: {reason}. Repair it, or set on_error=skip"
                )
            num_bad += len(bad)
            num_documents.update({s: len(segment.splits[s].ends) for s in SPLITS})
            yield segment
    for split in SPLITS if corpus.validation else SPLITS[:1]:
        if not num_documents[split]:
            raise DataError(
                f"{corpus.root}: of {num_documents.total()} documents none falls to "
                f"{split} with validation={corpus.validation} ({num_bad} bad records "
                f"were skipped). Give more text or another part (data.validation in "
                f"training; data.prepare holds nothing out with validation=0)"
            )


def _work_folder(config: PrepareConfig, storage: KeyValueStore) -> Path:
    digest = hashlib.sha256(storage.location.encode()).hexdigest()[:16]
    if config.work_dir:
        return local_path(config.work_dir) / f"prepare-{digest}"
    if storage.path is not None:
        return storage.path.with_name(f"{storage.path.name}.work")
    return cache_folder() / "prepare" / digest


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Lock a folder for this process; at the end, remove the folder if no part is left.

    The system releases the lock when the process ends, even if it is killed.
    """
    make_folder(folder, folder.parent, "work_dir")
    lock = folder / "lock"
    if lock.exists():
        check_regular(lock)
    with lock.open("a") as file:  # a link's file is not emptied
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"{folder}: another process is preparing this store. Wait for it"
            ) from error
        try:
            yield folder
        finally:
            if [path.name for path in folder.iterdir()] == ["lock"]:
                shutil.rmtree(folder, ignore_errors=True)


def make_folder(path: Path, parent: Path, setting: str) -> None:
    """Make a folder, or raise a DataError that names `parent` and what sets it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{parent}: nothing can be kept there ({error}). Set {setting} to a "
            f"writable folder"
        ) from error
