"""Preparations that are killed, whole or a worker of theirs, and how they go on."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import data.token_store.build
import data.token_store.writer
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.prepare_config import PrepareConfig
from data.token_store.build import prepare_store
from data.token_store.store import open_store
from tests.data.token_store import preparations
from tests.data.token_store.preparations import (
    content_of,
    refuse,
    some_texts,
    write_lines,
)
from tests.fleet import REPOSITORY

records = preparations.records
config = preparations.config
small_tasks = preparations.small_tasks


def test_a_worker_that_dies_is_told(config, small_tasks, monkeypatch):
    stop = threading.Event()

    def kill_workers() -> None:
        while not stop.wait(0.05):
            for child in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        refuse(config, "a worker process died.*same command continues", workers=2)
    finally:
        stop.set()
        killer.join()
    assert prepare_store(config).num_tokens("train")


SMALL = """
import pickle, sys
import data.text.files, data.token_store.build, data.token_store.encode
import data.token_store.local_shards, data.token_store.reader, data.token_store.writer
data.token_store.encode._TASK_BYTES = data.text.files.UNIT_BYTES = 40_000
stores = data.token_store
for module in (stores.writer, stores.reader, stores.local_shards):
    module.CHUNK_LENGTH, module.SHARD_LENGTH = 2**12, 2**15
data.token_store.build.prepare_store(pickle.loads(bytes.fromhex(sys.argv[1])))
"""


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen) -> None:
    """Kill it alone, not its workers, and see that they end: they hold its stderr."""
    process.kill()
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def begin(arguments: list[str], output: Path) -> subprocess.Popen:
    """Start a preparation, and wait until it holds its lock."""
    lock = Path(f"{output}.work", "lock")
    lock.unlink(missing_ok=True)
    process = start(arguments)
    while process.poll() is None and not lock.exists():
        time.sleep(0.005)
    return process


def end(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def drill(arguments: list[str], output: Path, kills: int, seconds: float) -> None:
    """Kill a command at random moments, go on with it, and let it end at last."""
    source = random.Random(kills)
    killed = 0
    while killed < kills:
        process = begin(arguments, output)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(source.uniform(0, seconds))
        killed += process.poll() is None
        kill(process)
        if (output / data.token_store.writer.MANIFEST).exists() and killed < kills:
            shutil.rmtree(output)
    end(start(arguments))


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_preparation_is_continued_to_the_same_bytes(tmp_path, kills):
    (tmp_path / "in").mkdir()
    for index in range(4):
        write_lines(tmp_path / f"in/{index}.jsonl", some_texts(5000, index))
    config = PrepareConfig(str(tmp_path / "in"), validation=0.1)

    def to(output: Path, workers: int) -> list[str]:
        own = dataclasses.replace(config, output=str(output), workers=workers)
        return [sys.executable, "-c", SMALL, pickle.dumps(own).hex()]

    process = begin(to(tmp_path / "whole", 2), tmp_path / "whole")
    began = time.monotonic()
    end(process)
    seconds = time.monotonic() - began
    expected = content_of(tmp_path / "whole")
    assert len(expected) > 80
    for workers in (1, 2):
        output = tmp_path / f"by-{workers}"
        drill(to(output, workers), output, kills // 2, seconds * workers / 2)
        assert content_of(output) == expected
        assert not Path(f"{output}.work").exists()


def test_what_was_killed_makes_way_for_other_settings(config, tmp_path, monkeypatch):
    """And while it lives it is alone."""

    def die(storage: KeyValueStore, *_: object) -> None:
        refuse(config, r"store\.work: another process is preparing this store")
        for name in ("train/tokens/c/9", "tokenizer.tiktoken"):
            storage.write(name, b"left behind")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data.token_store.build, "write_store", die)
        with pytest.raises(KeyboardInterrupt):
            prepare_store(config)
    with pytest.raises(DataError, match=r"manifest\.json: is not there"):
        open_store(tmp_path / "store")
    other = dataclasses.replace(config, validation=0.3)
    prepare_store(other)
    prepare_store(dataclasses.replace(other, output=str(tmp_path / "fresh")))
    assert content_of(tmp_path / "store") == content_of(tmp_path / "fresh")
