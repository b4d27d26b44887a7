"""A store holds each record once for any workers, and bad input is refused."""

import contextlib
import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

from data.catalog import FORMATS
from data.config import OnError
from data.program import PREFIX
from data.splits import SPLITS
from data.token_store import build, encode
from data.token_store.build import prepare_store
from data.token_store.layout import MANIFEST
from data.token_store.parts import split_of
from data.token_store.verify import verify_store
from tests.data.text.written_files import frame_of_zstd
from tests.data.token_store import preparations
from tests.data.token_store.preparations import (
    content_of,
    documents_of,
    refuse,
    some_texts,
)
from tests.fleet import REPOSITORY
from tests.program import module_option

records = preparations.records
config = preparations.config
small_tasks = preparations.small_tasks


def test_a_store_holds_each_record_once(config, records):
    store = prepare_store(config, FORMATS)
    documents = documents_of(store)
    texts = [text.encode() for text in some_texts(300)]
    rows = [text.encode() for text in some_texts(100, 1)]
    assert sorted(documents.values()) == sorted(texts * 2 + rows)
    assert store.manifest["empty_documents"] == 6
    offset = 0
    for line in (records / "a.jsonl").read_bytes().splitlines(keepends=True):
        name = f"a.jsonl:byte {offset}"
        text = json.loads(line)["text"].encode()
        split = split_of(name, 0.1)
        assert documents.get((split, name), b"") == text
        offset += len(line)
    num_held_out = sum(split == "validation" for split, _ in documents)
    assert 0.05 < num_held_out / len(documents) < 0.15
    counts = store.manifest["splits"]
    assert [count["documents"] for count in counts.values()] == [
        700 - num_held_out,
        num_held_out,
    ]
    assert sum(map(store.num_bytes, SPLITS)) == sum(map(len, texts * 2 + rows))
    assert list(verify_store(store)) == []
    assert not Path(f"{store.path}.work").exists()


def test_the_store_does_not_depend_on_workers_and_tasks(config, tmp_path, request):
    prepare_store(config, FORMATS)
    expected = content_of(tmp_path / "store")
    request.getfixturevalue("small_tasks")
    for workers in (1, 2, 4):
        output = tmp_path / f"by-{workers}"
        prepare_store(
            dataclasses.replace(config, output=str(output), workers=workers), FORMATS
        )
        assert content_of(output) == expected


def test_a_store_of_other_settings_is_refused_and_untouched(
    config, records, tmp_path, write_ranks
):
    ranks = write_ranks(tmp_path / "ranks")
    prepare_store(config, FORMATS)
    previous_content = content_of(tmp_path / "store")
    message = "store: is a store of other input or settings"
    refuse(config, message, validation=0.2)
    refuse(config, message, id_field="n")
    refuse(config, message, on_error=OnError.skip)
    refuse(config, message, input=str(records / "a.jsonl"))
    refuse(config, "another tokenizer", **ranks)
    with (records / "a.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    refuse(config, message)
    assert content_of(tmp_path / "store") == previous_content


def test_a_folder_of_other_files_is_refused_and_untouched(config, tmp_path):
    file = tmp_path / "store" / "sub" / "mine.txt"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    refuse(config, "store: is no token store")
    assert content_of(tmp_path / "store") == {"sub/mine.txt": b"mine"}


def test_an_output_that_cannot_be_written_is_named(config, records, tmp_path):
    inside_a_file = str(records / "a.jsonl" / "store")
    refuse(config, r"a\.jsonl: nothing can be kept there", output=inside_a_file)
    refuse(config, r"ftp://x/y: must be a local path", output="ftp://x/y")


def test_parts_are_not_made_twice(config, records, tmp_path, small_tasks, monkeypatch):
    """Parts are also kept if bad records are skipped only the second time."""
    with (records / "d.jsonl").open("w") as file:
        file.write("no JSON\n")
    refuse(config, r"d\.jsonl, line 1 \(byte 0\): no JSON")
    parts = set((tmp_path / "store.work").glob("*.part"))
    assert len(parts) > 20
    parts.remove(missing_part := min(parts))
    missing_part.unlink()
    write = encode.created_atomically
    paths = []

    def record_path(path: Path) -> contextlib.AbstractContextManager[Path]:
        paths.append(path)
        return write(path)

    monkeypatch.setattr(encode, "created_atomically", record_path)
    store = prepare_store(dataclasses.replace(config, on_error=OnError.skip), FORMATS)
    assert store.manifest["skipped_records"] == 1
    assert missing_part in paths
    assert not parts & set(paths)


def test_skipped_records_are_counted_and_listed(config, records, tmp_path):
    lines = (records / "a.jsonl").read_text().splitlines(keepends=True)
    lines[3:3] = ["{broken\n", '{"text": null}\n', '{"no": 1}\n']
    (records / "a.jsonl").write_text("".join(lines))
    (records / "sub/c.jsonl.gz").write_bytes(gzip.compress(b"x" * 99)[:-4])
    refuse(config, r"a\.jsonl, line 4 \(byte \d+\): no JSON.*on_error=skip.*text_field")
    store = prepare_store(dataclasses.replace(config, on_error=OnError.skip), FORMATS)
    assert store.manifest["skipped_records"] == 4
    skipped = (tmp_path / "store/skipped.jsonl").read_text().splitlines()
    bad_records = [json.loads(line) for line in skipped]
    assert [Path(bad["file"]).name for bad in bad_records] == ["a.jsonl"] * 3 + [
        "c.jsonl.gz"
    ]
    assert bad_records[1] == {
        "file": str(records / "a.jsonl"),
        "place": f"byte {len(''.join(lines[:4]).encode())}",
        "reason": "'text' is no text but null",
    }
    assert len(documents_of(store)) == 400


def test_other_files_in_a_work_folder_are_kept(config, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/mine.part").write_text("not yours")
    prepare_store(
        dataclasses.replace(config, work_dir=str(tmp_path / "scratch")), FORMATS
    )
    assert [p.name for p in (tmp_path / "scratch").iterdir()] == ["mine.part"]


def test_an_empty_split_is_refused_unless_validation_is_zero(config, tmp_path):
    store = prepare_store(dataclasses.replace(config, validation=0.0), FORMATS)
    assert store.num_tokens("validation") == 0
    assert store.text("validation") == b""
    assert list(verify_store(store)) == []
    assert len(documents_of(store)) == 700
    output = str(tmp_path / "other")
    for fraction, split in ((1e-12, "validation"), (1 - 1e-12, "train")):
        message = f"of 700 documents none falls to {split}"
        refuse(config, message, validation=fraction, output=output)
    assert MANIFEST not in content_of(output)
    assert prepare_store(dataclasses.replace(config, output=output), FORMATS)


def test_a_full_disk_is_reported(config, monkeypatch):
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_disk_full)
        refuse(config, r"cannot be written \(.*No space left.*Free space")
    monkeypatch.setattr(build, "write_store", raise_disk_full)
    refuse(config, r"store: cannot be written \(.*No space left.*Free space")


def test_the_memory_for_long_windows_limits_the_workers(
    config, records, caplog, monkeypatch
):
    """Three workers do not have the memory for a window of 1 GiB."""
    frame = frame_of_zstd(b'{"text": "a"}\n', 30)
    (records / "sub/e.jsonl.zst").write_bytes(frame)
    monkeypatch.setattr(build, "available_memory", lambda: 4 << 30)
    prepare_store(dataclasses.replace(config, workers=3), FORMATS)
    assert "e.jsonl.zst: decompressing it needs 1.0 GiB of memory" in caplog.text
    assert "at most 2 workers" in caplog.text


def test_the_command_prepares_a_store(config, tmp_path):
    def prepare(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *module_option("data.prepare")]
        command += [f"input={config.input}", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    output = f"output={tmp_path}/door"
    first = prepare(output, "validation=0.1", "workers=2")
    assert first.returncode == 0, first.stderr
    next_command = f"python -m {PREFIX}train data=tokens data.path={tmp_path}/door"
    assert next_command in first.stdout
    prepare_store(config, FORMATS)
    assert content_of(tmp_path / "door") == content_of(tmp_path / "store")
    second = prepare(output, "validation=0.1")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "is there already" in second.stderr
    assert content_of(tmp_path / "door") == content_of(tmp_path / "store")
    assert prepare().returncode == 78
