import dataclasses
import hashlib
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from data.catalog import text_store
from data.config import FormatName
from data.errors import DataError
from data.splits import SPLITS
from data.token_store import build, encode, writer
from data.token_store.layout import ARRAYS, MANIFEST
from data.token_store.store import open_store
from data.token_store.verify import verify_store
from tests.data.token_store.preparations import documents_of


def test_progress_is_reported_while_text_is_encoded(config, monkeypatch):
    monkeypatch.setattr(encode, "_TASK_BYTES", 1000)
    calls = []
    text_store(config, lambda: calls.append(1))
    assert len(calls) > 2
    text_store(config, lambda: pytest.fail("nothing is encoded again"))


def test_a_store_holds_every_byte_of_its_text(config, folder):
    store = text_store(config)
    texts = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    documents = documents_of(store)
    assert {name: text for (_, name), text in documents.items()} == {
        name: text for name, text in texts.items() if text
    }
    assert store.manifest["empty_documents"] == 2
    train = [text for (split, _), text in documents.items() if split == "train"]
    assert store.text("train") == b"".join(train)
    assert store.text("train", 20) == b"".join(train)[:20]
    assert store.num_bytes("train") == sum(map(len, train))
    assert store.num_tokens("train") == sum(map(len, train)) + len(train)
    assert store.split("train").read(0, 1).dtype == np.uint16
    assert list(verify_store(store)) == []


@pytest.mark.parametrize("text", [b"0123456789" * 10, bytes(100)])
def test_a_single_file_has_no_end_token_inside(config, tmp_path, text):
    path = tmp_path / "one.txt"
    path.write_bytes(text)
    single_file = dataclasses.replace(config, path=str(path), format=FormatName.text)
    store = text_store(single_file)
    assert store.text("train") + store.text("validation") == text
    assert store.num_tokens("train") == store.num_bytes("train") == 75
    assert store.split("train").offsets.tolist() == [0, 75]


def test_a_store_is_built_once(config, folder, monkeypatch):
    store = text_store(config)
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_store", None)
        assert text_store(config).path == store.path
    (folder / "00.txt").write_bytes(b"longer")
    changed = text_store(config)
    assert changed.path != store.path
    assert changed.fingerprint != store.fingerprint


def test_equal_text_has_an_equal_fingerprint_anywhere(config, folder, tmp_path):
    store = text_store(config)
    new_folder = tmp_path / "elsewhere"
    folder.rename(new_folder)
    copy = text_store(dataclasses.replace(config, path=str(new_folder)))
    assert copy.path != store.path
    assert copy.fingerprint == store.fingerprint


def test_a_cache_that_cannot_be_written_is_named(config, folder):
    inside_a_file = dataclasses.replace(config, cache_dir=str(folder / "01.txt"))
    with pytest.raises(DataError, match=r"01\.txt: .*data\.cache_dir"):
        text_store(inside_a_file)


def test_an_interrupted_preparation_is_done_again(config, monkeypatch):
    def die(*arguments):
        writer.write_store(*arguments)
        arguments[0].write(MANIFEST, None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_store", die)
        with pytest.raises(KeyboardInterrupt):
            text_store(config)
    assert not list(Path(config.cache_dir).iterdir())
    store = text_store(config)
    fingerprint = store.fingerprint
    Path(store.path, "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: is not there"):
        open_store(store.path)
    assert text_store(config).fingerprint == fingerprint
    assert [str(path) for path in Path(config.cache_dir).iterdir()] == [store.path]


def test_old_folders_of_killed_preparations_are_removed(config):
    store = text_store(config)
    old, young = [Path(f"{store.path}.building-{n}") for n in "ab"]
    for folder in (old, young):
        folder.mkdir()
    day_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (day_ago, day_ago))
    Path(store.path, "manifest.json").unlink()
    text_store(config)
    assert young.exists()
    assert not old.exists()


def test_a_slower_process_takes_the_faster_ones_store(config, monkeypatch):
    first_status = []

    def write_second(*arguments):
        writer.write_store(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(build, "write_store", writer.write_store)
            first_status.append(Path(text_store(config).path, "manifest.json").stat())

    monkeypatch.setattr(build, "write_store", write_second)
    store = text_store(config)
    assert Path(store.path, "manifest.json").stat().st_ino == first_status[0].st_ino
    assert len(list(Path(config.cache_dir).iterdir())) == 1


def test_a_store_names_its_tokenizer(config, tmp_path, write_ranks):
    path = tmp_path / "ranks"
    with_ranks = dataclasses.replace(config, **write_ranks(path))
    store = text_store(with_ranks)
    path.unlink()  # the store has a copy
    assert store.path != text_store(config).path
    assert open_store(store.path).text("train") == text_store(config).text("train")
    with pytest.raises(DataError, match="another tokenizer"):
        open_store(store.path, text_store(config).encoding)


def test_another_schema_is_refused(config):
    store = text_store(config)
    content = json.dumps({**store.manifest, "schema": 99}).encode()
    Path(store.path, "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json: is damaged"):
        open_store(store.path)
    digest = hashlib.sha256(content).hexdigest()
    Path(store.path, "manifest.json.sha256").write_text(digest)
    with pytest.raises(DataError, match="schema is 99"):
        open_store(store.path)


def all_arrays(path: str) -> dict[str, bytes]:
    store = open_store(path)
    arrays = {
        f"{split}/{name}": store.split(split).array(name).tobytes()
        for split in SPLITS
        for name in ARRAYS
    }
    tokens = store.split("train")  # gather reads files in the fastest way
    (arrays["gathered"],) = tokens.gather(np.array([0]), np.array([len(tokens)]))
    arrays["gathered"] = arrays["gathered"].tobytes()
    return arrays


def test_any_damage_to_any_file_is_found_and_named(
    config, tmp_path, small_chunks, kept, write_ranks
):
    ranks = write_ranks(tmp_path / "ranks")
    store = text_store(dataclasses.replace(config, **ranks))
    intact = all_arrays(store.path)
    source = random.Random(kept)
    files = sorted(path for path in Path(store.path).rglob("*") if path.is_file())
    # The manifest's size must not decide how often the other files are damaged.
    for trial in range(200):
        file = files[trial % len(files)]
        content = file.read_bytes()
        damage = bytearray(content)
        index = source.randrange(len(content) or 1)
        kind = source.choice(["flip", "flip", "flip", "cut", "add", "remove"])
        if kind == "flip" and content:
            damage[index] ^= 1 << source.randrange(8)
        elif kind == "cut" and content:
            del damage[index:]
        else:
            damage[index:index] = source.randbytes(3)
        file.write_bytes(damage)
        if kind == "remove":
            file.unlink()
        relative = file.relative_to(store.path).as_posix()
        name = relative.partition("/c/")[0].removesuffix(".sha256")
        reports = []
        try:
            reports += verify_store(open_store(store.path))
            arrays = all_arrays(store.path)
        except DataError as error:
            reports.append(str(error))
        else:  # no array is from the rank file or from skipped.jsonl
            assert arrays == intact
        assert any(name in report for report in reports), (relative, kind, reports)
        file.write_bytes(content)
    assert list(verify_store(open_store(store.path))) == []


@pytest.mark.parametrize("name", ["nowhere", "no/where", "text.txt", "text", "empty"])
def test_an_error_does_not_advise_to_delete_a_path_without_a_store(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("mine")
    (tmp_path / "text.txt").write_text("mine")
    with pytest.raises(DataError) as error:
        open_store(tmp_path / name)
    assert "elete" not in str(error.value)
    expected = {"text.txt": "is a file", "text": "is not there", "empty": "is not"}
    assert expected.get(name, "there is no such folder") in str(error.value)
