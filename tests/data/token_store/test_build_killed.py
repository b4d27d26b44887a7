"""A preparation continues after it or one of its workers was killed."""

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

from data.catalog import FORMATS
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.prepare_config import PrepareConfig
from data.token_store import build
from data.token_store.build import prepare_store
from data.token_store.layout import MANIFEST
from data.token_store.store import open_store
from tests.data.token_store import preparations
from tests.data.token_store.preparations import (
    content_of,
    refuse,
    some_texts,
    write_lines,
)
from tests.fleet import REPOSITORY
from tests.program import program_code

records = preparations.records
config = preparations.config
small_tasks = preparations.small_tasks


def test_a_worker_that_dies_is_reported(config, small_tasks, monkeypatch):
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
    assert prepare_store(config, FORMATS).num_tokens("train")


SMALL = program_code("""
import pickle, sys
from data.catalog import FORMATS
from data.text import files
from data.token_store import build, encode, layout, local_shards, reader, writer
encode._TASK_BYTES = files.UNIT_BYTES = 40_000
for module in (layout, writer, reader, local_shards):
    module.CHUNK_LENGTH, module.SHARD_LENGTH = 2**12, 2**15
config = pickle.loads(bytes.fromhex(sys.argv[1]))
build.prepare_store(config, FORMATS)
""")


def start_process(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen) -> None:
    """Kill only this process, and check that its workers end: they hold its stderr."""
    process.kill()
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def start_and_wait_for_lock(arguments: list[str], output: Path) -> subprocess.Popen:
    """Start a preparation, and wait until it holds its lock."""
    lock = Path(f"{output}.work", "lock")
    lock.unlink(missing_ok=True)
    process = start_process(arguments)
    while process.poll() is None and not lock.exists():
        time.sleep(0.005)
    return process


def wait_for_success(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def kill_repeatedly(
    arguments: list[str], output: Path, kills: int, seconds: float
) -> None:
    """Kill and restart a command at random moments, and at last let it end."""
    source = random.Random(kills)
    num_killed = 0
    while num_killed < kills:
        process = start_and_wait_for_lock(arguments, output)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(source.uniform(0, seconds))
        num_killed += process.poll() is None
        kill(process)
        if (output / MANIFEST).exists() and num_killed < kills:
            shutil.rmtree(output)
    wait_for_success(start_process(arguments))


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_preparation_is_continued_to_the_same_bytes(tmp_path, kills):
    (tmp_path / "in").mkdir()
    for index in range(4):
        write_lines(tmp_path / f"in/{index}.jsonl", some_texts(5000, index))
    config = PrepareConfig(str(tmp_path / "in"), validation=0.1)

    def command_for(output: Path, workers: int) -> list[str]:
        prepare_config = dataclasses.replace(
            config, output=str(output), workers=workers
        )
        return [sys.executable, "-c", SMALL, pickle.dumps(prepare_config).hex()]

    process = start_and_wait_for_lock(
        command_for(tmp_path / "whole", 2), tmp_path / "whole"
    )
    start_time = time.monotonic()
    wait_for_success(process)
    seconds = time.monotonic() - start_time
    expected = content_of(tmp_path / "whole")
    assert len(expected) > 80
    for workers in (1, 2):
        output = tmp_path / f"by-{workers}"
        kill_repeatedly(
            command_for(output, workers), output, kills // 2, seconds * workers / 2
        )
        assert content_of(output) == expected
        assert not Path(f"{output}.work").exists()


def test_a_killed_preparation_does_not_block_other_settings(
    config, tmp_path, monkeypatch
):
    """While it lives, no other process can prepare the store."""

    def die(storage: KeyValueStore, *_: object) -> None:
        refuse(config, r"store\.work: another process is preparing this store")
        for name in ("train/tokens/c/9", "tokenizer.tiktoken"):
            storage.write(name, b"left behind")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_store", die)
        with pytest.raises(KeyboardInterrupt):
            prepare_store(config, FORMATS)
    with pytest.raises(DataError, match=r"manifest\.json: is not there"):
        open_store(tmp_path / "store")
    changed_config = dataclasses.replace(config, validation=0.3)
    prepare_store(changed_config, FORMATS)
    prepare_store(
        dataclasses.replace(changed_config, output=str(tmp_path / "fresh")), FORMATS
    )
    assert content_of(tmp_path / "store") == content_of(tmp_path / "fresh")
