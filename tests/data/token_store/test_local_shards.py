"""Files of a local store give what TensorStore reads, or an error, never other data."""

import contextlib
import errno
import functools
import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from data.catalog import text_store
from data.errors import DataError
from data.token_store import local_shards, reader
from data.token_store.local_shards import LocalShards
from data.token_store.store import Store


@pytest.fixture
def store(config, small_chunks, monkeypatch) -> Store:
    """Return a store of some 900 tokens in 4 shards of 4 chunks, read from disk."""
    monkeypatch.setattr(reader, "MEMORY_LIMIT_BYTES", 0)
    return text_store(config)


def shards_of(store: Store) -> LocalShards:
    return store.open("train")._local["tokens"]


def open_files(store: Store) -> set[tuple[str, Path]]:
    """Return this process's open files below `store`, as descriptors and paths.

    TensorStore's threads and the garbage of earlier tests may close files at any time.
    """
    folder = os.path.realpath(store.path)
    files = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's descriptor is closed
            path = link.readlink()
            if path.is_relative_to(folder):
                files.add((link.name, path))
    return files


@pytest.mark.parametrize("damage", ["cut while open", "removed", "without a chunk"])
def test_missing_values_are_named_by_their_file(store, damage):
    tokens = store.split("train")
    spans = np.array([10, 2 * 256 + 70]), np.array([5, 5])
    assert [len(values) for values in tokens.gather(*spans)] == [5, 5]
    if damage != "cut while open":
        local_shards._open_shard.cache_clear()
    file = Path(store.path, "train/tokens/c/2")
    content = file.read_bytes()
    if damage == "cut while open":
        os.truncate(file, 100)
    else:
        file.unlink()
    if damage == "without a chunk":
        chunks = content[: -16 * 4 - 4]
        index = bytearray(content[-16 * 4 - 4 : -4])
        index[16:32] = b"\xff" * 16
        checksum = google_crc32c.value(bytes(index)).to_bytes(4, "little")
        file.write_bytes(chunks + index + checksum)
    with pytest.raises(DataError, match=r"train/tokens/c/2: values .* missing or dam"):
        tokens.gather(*spans)
    assert len(tokens.gather(np.array([10]), np.array([5]))[0]) == 5


def test_a_read_that_fails_is_tried_through_tensorstore(store, monkeypatch, caplog):
    def pread(*arguments: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tokens = store.split("train")
    (expected,) = tokens.gather(np.array([70]), np.array([200]))
    monkeypatch.setattr(os, "pread", pread)
    (actual,) = tokens.gather(np.array([70]), np.array([200]))
    np.testing.assert_array_equal(actual, expected)
    assert "Input/output error; reading it again through TensorStore" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_number_of_open_files_is_limited(store, monkeypatch):
    open_shard = functools.lru_cache(2)(local_shards._open_shard.__wrapped__)
    monkeypatch.setattr(local_shards, "_open_shard", open_shard)
    shards = shards_of(store)
    previous_files = open_files(store)
    for start in (10, 300, 600, 10):
        shards.read([(start, start + 5)])
    opened_files = open_files(store) - previous_files
    assert len(opened_files) == 2
    del shards
    open_shard.cache_clear()
    assert not opened_files & open_files(store)
