import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data.reader
import data.store
import data.writer
from data.errors import DataError
from data.store import compression_bits_per_byte, open_store, prepare
from tests.data.test_tokenizer import write_ranks

ROOT = Path(__file__).parents[2]


def only_shard(store, array: str) -> Path:
    (file,) = [file for file in (store.path / array / "c").rglob("*") if file.is_file()]
    return file


def test_a_store_holds_every_byte_of_its_text(config, folder):
    store = prepare(config)
    ids = json.loads((store.path / "train" / "documents.json").read_text())
    tokens = store.split("train")
    texts = [(folder / name).read_bytes() for name in ids]
    assert store.text("train") == b"".join(texts)
    assert store.text("train", 20) == b"".join(texts)[:20]
    assert store.num_bytes("train") == sum(map(len, texts))
    assert store.num_tokens("train") == len(tokens) == sum(map(len, texts)) + len(ids)
    for name, start, end in zip(
        ids, tokens.offsets[:-1], tokens.offsets[1:], strict=True
    ):
        document = tokens.read(start, end)
        assert document[-1] == store.encoding.eot_token
        assert document[:-1].astype(np.uint8).tobytes() == (folder / name).read_bytes()
    assert tokens.read(0, 1).dtype == np.uint16


def test_a_single_file_has_no_end_inside(config, tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"0123456789" * 10)
    store = prepare(dataclasses.replace(config, path=str(path)))
    assert store.text("train") + store.text("validation") == path.read_bytes()
    assert store.num_tokens("train") == store.num_bytes("train") == 75
    assert store.split("train").offsets.tolist() == [0, 75]


def test_a_text_of_zeros_is_a_text(config, tmp_path):
    path = tmp_path / "zeros"
    path.write_bytes(bytes(100))
    store = prepare(dataclasses.replace(config, path=str(path)))
    assert store.text("train") == bytes(75)


def test_a_store_larger_than_a_shard_is_read_back(config, monkeypatch):
    whole = prepare(config)
    monkeypatch.setattr(data.writer, "SHARD_LENGTH", 256)
    monkeypatch.setattr(data.writer, "CHUNK_LENGTH", 64)
    sharded = prepare(dataclasses.replace(config, name="sharded"))
    assert len(list((sharded.path / "train/tokens/c").iterdir())) > 3
    assert sharded.text("train") == whole.text("train")
    assert sharded.fingerprint == whole.fingerprint


@pytest.mark.parametrize("limit", [0, 2**30])
def test_rows_read_alike_from_disk_and_memory(config, monkeypatch, limit):
    monkeypatch.setattr(data.reader, "MEMORY_LIMIT_BYTES", limit)
    tokens = prepare(config).split("train")
    assert tokens.in_memory == bool(limit)
    flat = tokens.read(0, len(tokens))
    starts = np.array([5, len(tokens) - 3, len(tokens) + 9, 0])
    rows = tokens.read_rows(starts, 8)
    assert rows.dtype == np.int32
    expected = [flat[5:13], [*flat[-3:], 0, 0, 0, 0, 0], [0] * 8, flat[:8]]
    np.testing.assert_array_equal(rows, expected)


def test_a_store_is_built_once(config, folder, monkeypatch):
    store = prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr(data.store, "write_store", None)
        assert prepare(config).path == store.path
    (folder / "00.txt").write_bytes(b"longer")
    changed = prepare(config)
    assert changed.path != store.path
    assert changed.fingerprint != store.fingerprint


def test_equal_text_has_an_equal_fingerprint_anywhere(config, folder, tmp_path):
    store = prepare(config)
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    copy = prepare(dataclasses.replace(config, path=str(moved)))
    assert copy.path != store.path
    assert copy.fingerprint == store.fingerprint


def test_the_default_place_follows_xdg(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = prepare(dataclasses.replace(config, cache_dir=None))
    assert store.path.parent == tmp_path / "xdg" / "longhaul" / "stores"
    assert store.path.name.startswith("tiny-")


def test_a_cache_that_cannot_be_written_is_named(config, folder):
    inside_a_file = dataclasses.replace(config, cache_dir=str(folder / "01.txt"))
    with pytest.raises(DataError, match=r"01\.txt: .*data\.cache_dir"):
        prepare(inside_a_file)


@pytest.mark.parametrize("limit", [0, 2**30])
@pytest.mark.parametrize("array", ["tokens", "offsets"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_chunk_is_found(config, monkeypatch, limit, array, damage):
    monkeypatch.setattr(data.reader, "MEMORY_LIMIT_BYTES", limit)
    store = prepare(config)
    file = only_shard(store, f"train/{array}")
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    if damage == "flip":
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    with pytest.raises(DataError, match=f"train/{array}.*Delete {store.path}"):
        open_store(store.path).split("train").read(0, 20)


def test_an_interrupted_preparation_is_done_again(config, monkeypatch):
    def die(*arguments):
        data.writer.write_store(*arguments)
        (arguments[0] / data.writer.MANIFEST).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data.store, "write_store", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    assert not list(Path(config.cache_dir).iterdir())
    store = prepare(config)
    fingerprint = store.fingerprint
    (store.path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        open_store(store.path)
    assert prepare(config).fingerprint == fingerprint
    assert [path.name for path in Path(config.cache_dir).iterdir()] == [store.path.name]


def test_what_a_killed_preparation_left_is_removed_later(config):
    store = prepare(config)
    old, young = [store.path.with_name(f"{store.path.name}.building-{n}") for n in "ab"]
    for folder in (old, young):
        folder.mkdir()
    day_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (day_ago, day_ago))
    (store.path / "manifest.json").unlink()
    prepare(config)
    assert young.exists()
    assert not old.exists()


def test_processes_may_prepare_at_once(config):
    script = (
        "import sys, time; from data.config import *; from data.store import prepare\n"
        "config = eval(sys.argv[1]); print('ready', flush=True); input()\n"
        "store = prepare(config); print(store.fingerprint, len(store.text('train')))"
    )
    arguments = repr(config).replace(repr(config.source), "Source.text")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda p: p.communicate("\n", 60)[0], processes))
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(Path(config.cache_dir).iterdir())) == 1


def test_a_slower_process_takes_the_faster_ones_store(config, monkeypatch):
    faster = []

    def overtaken(*arguments):
        data.writer.write_store(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(data.store, "write_store", data.writer.write_store)
            faster.append((prepare(config).path / "manifest.json").stat())

    monkeypatch.setattr(data.store, "write_store", overtaken)
    store = prepare(config)
    assert (store.path / "manifest.json").stat().st_ino == faster[0].st_ino
    assert len(list(Path(config.cache_dir).iterdir())) == 1


def test_a_store_names_its_tokenizer(config, tmp_path):
    path = tmp_path / "ranks"
    with_ranks = dataclasses.replace(
        config, tokenizer=str(path), tokenizer_sha256=write_ranks(path)
    )
    store = prepare(with_ranks)
    assert store.path != prepare(config).path
    assert open_store(store.path).text("train") == prepare(config).text("train")
    with pytest.raises(DataError, match="another tokenizer"):
        open_store(store.path, prepare(config).encoding)


def test_another_schema_is_refused(config):
    store = prepare(config)
    manifest = {**store.manifest, "schema": 99}
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="schema is 99"):
        open_store(store.path)


def test_compression_is_in_bits_per_byte():
    random = np.random.default_rng(0).bytes(50_000)
    assert all(8 < bits < 8.1 for bits in compression_bits_per_byte(random).values())
    bits = compression_bits_per_byte(b"ab" * 25_000)
    assert set(bits) == {"gzip", "xz"}
    assert all(0 < value < 0.1 for value in bits.values())
    with pytest.raises(ValueError, match="text"):
        compression_bits_per_byte(b"")
