"""Stores from a preparation that is parallel, killed, repeated, or far away."""

import contextlib
import dataclasses
import functools
import gzip
import http.server
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.text.files
import data.token_store.build
import data.token_store.encode
import data.token_store.writer
from data.config import OnError, PrepareConfig
from data.errors import DataError
from data.text.files import SPLITS
from data.token_store.build import prepare_store
from data.token_store.parts import split_of
from data.token_store.storage import Storage
from data.token_store.store import Store, open_store
from tests.data.test_tokenizer import write_ranks
from tests.fleet import REPOSITORY


def write_lines(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in lines))


def some_texts(count: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return [source.randbytes(source.randrange(90)).hex() + "猫\n" for _ in range(count)]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Records in three formats, some texts of which are empty."""
    folder = tmp_path / "records"
    (folder / "sub").mkdir(parents=True)
    write_lines(folder / "a.jsonl", ["", *some_texts(300), ""])
    write_lines(folder / "sub/b.jsonl", ["", ""])
    content = (folder / "a.jsonl").read_bytes()
    (folder / "sub/c.jsonl.gz").write_bytes(gzip.compress(content))
    pq.write_table(pa.table({"text": some_texts(100, 1)}), folder / "d.parquet")
    return folder


@pytest.fixture
def config(records: Path, tmp_path: Path) -> PrepareConfig:
    output = str(tmp_path / "store")
    return PrepareConfig(str(records), output, validation=0.1, workers=1)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a few hundred bytes: they are made here and sent to the workers."""
    monkeypatch.setattr(data.token_store.encode, "_TASK_BYTES", 1000)
    monkeypatch.setattr(data.text.files, "UNIT_BYTES", 700)


def content_of(folder: Path | str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def documents_of(store: Store) -> dict[str, bytes]:
    found = {}
    for split in SPLITS:
        tokens = store.split(split)
        for number, (start, end) in enumerate(
            zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
        ):
            ids = tokens.read(start, end)
            assert ids[-1] == store.encoding.eot_token
            name = tokens.document_id(number)
            assert (split, name) not in found
            found[split, name] = store.encoding.decode_bytes(ids[:-1].tolist())
    return found


def refuse(config: PrepareConfig, message: str, **changes: object) -> None:
    with pytest.raises(DataError, match=message):
        prepare_store(dataclasses.replace(config, **changes))  # type: ignore


def test_a_store_holds_each_record_once(config, records):
    store = prepare_store(config)
    found = documents_of(store)
    texts = [text.encode() for text in some_texts(300)]
    rows = [text.encode() for text in some_texts(100, 1)]
    assert sorted(found.values()) == sorted(texts * 2 + rows)
    assert store.manifest["empty_documents"] == 6
    at = 0
    for line in (records / "a.jsonl").read_bytes().splitlines(keepends=True):
        name, text = f"a.jsonl:byte {at}", json.loads(line)["text"].encode()
        split = split_of(name, 0.1)
        assert found.get((split, name), b"") == text
        at += len(line)
    held = sum(split == "validation" for split, _ in found)
    assert 0.05 < held / len(found) < 0.15
    counts = store.manifest["splits"]
    assert [count["documents"] for count in counts.values()] == [700 - held, held]
    assert sum(map(store.num_bytes, SPLITS)) == sum(map(len, texts * 2 + rows))
    assert list(store.verify()) == []
    assert not Path(f"{store.path}.work").exists()


def test_the_store_does_not_depend_on_workers_and_tasks(config, tmp_path, request):
    prepare_store(config)
    whole = content_of(tmp_path / "store")
    request.getfixturevalue("small_tasks")
    for workers in (1, 2, 4):
        output = tmp_path / f"by-{workers}"
        prepare_store(dataclasses.replace(config, output=str(output), workers=workers))
        assert content_of(output) == whole


def test_a_store_of_other_settings_is_refused_and_untouched(config, records, tmp_path):
    ranks = {"tokenizer": str(tmp_path / "ranks")}
    ranks["tokenizer_sha256"] = write_ranks(tmp_path / "ranks")
    prepare_store(config)
    before = content_of(tmp_path / "store")
    other = "store: is a store of other input or other settings"
    refuse(config, other, validation=0.2)
    refuse(config, other, id_field="n")
    refuse(config, other, on_error=OnError.skip)
    refuse(config, other, input=str(records / "a.jsonl"))
    refuse(config, "another tokenizer", **ranks)
    with (records / "a.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    refuse(config, other)
    assert content_of(tmp_path / "store") == before


def test_a_folder_of_other_files_is_refused_and_untouched(config, tmp_path):
    mine = tmp_path / "store" / "sub" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refuse(config, "store: is not empty, and is no token store")
    assert content_of(tmp_path / "store") == {"sub/mine.txt": b"mine"}


def test_an_output_that_cannot_be_written_is_named(config, records, tmp_path):
    inside_a_file = str(records / "a.jsonl" / "store")
    refuse(config, r"a\.jsonl: nothing can be kept there", output=inside_a_file)
    refuse(config, r"ftp://x/y: is no local path", output="ftp://x/y")


def test_parts_are_not_made_twice(config, records, tmp_path, small_tasks, monkeypatch):
    """Nor where bad records are skipped only the second time."""
    with (records / "d.jsonl").open("w") as file:
        file.write("no JSON\n")
    refuse(config, r"d\.jsonl, line 1 \(byte 0\): no JSON")
    parts = set((tmp_path / "store.work").glob("*.part"))
    assert len(parts) > 20
    parts.remove(lost := min(parts))
    lost.unlink()
    write, written = data.token_store.encode.written_whole, []

    def recorded(path: Path) -> contextlib.AbstractContextManager[Path]:
        written.append(path)
        return write(path)

    monkeypatch.setattr(data.token_store.encode, "written_whole", recorded)
    store = prepare_store(dataclasses.replace(config, on_error=OnError.skip))
    assert store.manifest["skipped_records"] == 1
    assert lost in written
    assert not parts & set(written)


def test_what_is_skipped_is_counted_and_listed(config, records, tmp_path):
    lines = (records / "a.jsonl").read_text().splitlines(keepends=True)
    lines[3:3] = ["{broken\n", '{"text": null}\n', '{"no": 1}\n']
    (records / "a.jsonl").write_text("".join(lines))
    (records / "sub/c.jsonl.gz").write_bytes(gzip.compress(b"x" * 99)[:-4])
    refuse(config, r"a\.jsonl, line 4 \(byte \d+\): no JSON.*on_error=skip")
    store = prepare_store(dataclasses.replace(config, on_error=OnError.skip))
    assert store.manifest["skipped_records"] == 4
    skipped = (tmp_path / "store/skipped.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in skipped]
    assert [Path(bad["file"]).name for bad in found] == ["a.jsonl"] * 3 + ["c.jsonl.gz"]
    assert found[1] == {
        "file": str(records / "a.jsonl"),
        "place": f"byte {len(''.join(lines[:4]).encode())}",
        "reason": "'text' is no text but null",
    }
    assert len(documents_of(store)) == 400


def test_a_folder_of_work_keeps_what_else_is_in_it(config, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/mine.part").write_text("not yours")
    prepare_store(dataclasses.replace(config, work_dir=str(tmp_path / "scratch")))
    assert [p.name for p in (tmp_path / "scratch").iterdir()] == ["mine.part"]


def test_a_text_that_is_not_utf8_leaves_no_document(tmp_path):
    for name, text in {"a": b"a", "b": b"\xff", "c": b"c", "d": b"d"}.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    config = PrepareConfig(str(tmp_path), str(tmp_path / "store"), "*.txt", workers=1)
    refuse(config, r"b\.txt, line 1 \(byte 0\): not UTF-8")
    skipping = dataclasses.replace(config, on_error=OnError.skip)
    store = prepare_store(skipping)
    texts = documents_of(store)
    assert set(texts.values()) == {b"a", b"c", b"d"}


def test_nothing_is_held_out_only_if_asked(config, tmp_path):
    store = prepare_store(dataclasses.replace(config, validation=0.0))
    assert store.num_tokens("validation") == 0
    assert store.text("validation") == b""
    assert list(store.verify()) == []
    assert len(documents_of(store)) == 700
    output = str(tmp_path / "other")
    for wrong, split in ((1e-12, "validation"), (1 - 1e-12, "train")):
        message = f"of 700 documents none falls to {split}"
        refuse(config, message, validation=wrong, output=output)
    assert data.token_store.writer.MANIFEST not in content_of(output)
    assert prepare_store(dataclasses.replace(config, output=output))


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


def test_a_full_disk_is_told(config, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refuse(config, r"cannot be written \(.*No space left.*Free space")
    monkeypatch.setattr(data.token_store.build, "write_store", full)
    refuse(config, r"store: cannot be written \(.*No space left.*Free space")


def test_the_command(config, tmp_path):
    def prepare(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "data.prepare", f"input={config.input}"]
        return subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True
        )

    output = f"output={tmp_path}/door"
    first = prepare(output, "validation=0.1", "workers=2")
    assert first.returncode == 0, first.stderr
    assert f"python -m train data=tokens data.path={tmp_path}/door" in first.stdout
    prepare_store(config)
    assert content_of(tmp_path / "door") == content_of(tmp_path / "store")
    again = prepare(output, "validation=0.1")
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "is there already" in again.stderr
    assert content_of(tmp_path / "door") == content_of(tmp_path / "store")
    assert prepare().returncode == 78


# Not `python -m data.prepare`: its tasks would be too large to be killed among them.
SMALL = """
import pickle, sys
import data.text.files, data.token_store.build, data.token_store.encode
import data.token_store.reader, data.token_store.writer
data.token_store.encode._TASK_BYTES = data.text.files.UNIT_BYTES = 40_000
for module in (data.token_store.writer, data.token_store.reader):
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
    source, killed = random.Random(kills), 0
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

    def die(storage: Storage, *_: object) -> None:
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


def test_from_s3_to_s3(bucket, config, records, tmp_path):
    prepare_store(config)
    bucket.put(f"{records}/", "bucket/in", recursive=True)
    far = dataclasses.replace(
        config, input="s3://bucket/in", output="s3://bucket/stores/far"
    )
    assert prepare_store(far).path == far.output
    near = content_of(tmp_path / "store")
    found = {
        name.removeprefix("bucket/stores/far/"): bucket.cat_file(name)
        for name in bucket.find("bucket/stores/far")
    }
    assert found.keys() == near.keys()
    of_place = {"manifest.json", "manifest.json.sha256"}
    assert {name for name in near if found[name] != near[name]} == of_place
    assert list(open_store(far.output or "").verify()) == []
    prepare_store(far)
    refuse(far, "other settings", validation=0.2)
    bucket.pipe_file("bucket/mine/file", b"mine")
    refuse(far, "is not empty", output="s3://bucket/mine")
    bucket.pipe_file("bucket/stores/far/train/tokens/c/0", b"damaged")
    reports = list(open_store(far.output or "").verify())
    assert ["s3://bucket/stores/far/train/tokens" in report for report in reports]
    refuse(far, "s3://nowhere/x", output="s3://nowhere/x")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Python's own server does not know of ranges; real ones do."""

    def log_message(self, *_: object) -> None:
        pass

    def send_head(self):
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            return super().send_head()
        content = path.read_bytes()
        low, high = int(asked[1] or -int(asked[2])), len(content)
        if asked[1] and asked[2]:
            high = int(asked[2]) + 1
        low = max(0, low if low >= 0 else high + low)
        part = content[low:high]
        self.send_response(206)
        whole = f"bytes {low}-{low + len(part) - 1}/{len(content)}"
        self.send_header("Content-Range", whole)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


def test_a_store_is_read_over_http(config, tmp_path, monkeypatch):
    near = prepare_store(config)
    Path(near.path, "nothing").mkdir()
    monkeypatch.setattr(data.token_store.reader, "MEMORY_LIMIT_BYTES", 0)
    monkeypatch.setattr(data.token_store.reader, "OFFSETS_LIMIT", 0)
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/store"
        store = open_store(url)
        assert documents_of(store) == documents_of(near)
        assert list(store.verify()) == []
        with pytest.raises(DataError, match=r"nothing/manifest\.json: is not there"):
            open_store(f"{url}/nothing")
        Path(near.path, "train/ids/c/0").unlink()
        with pytest.raises(DataError, match="store/train/ids"):
            documents_of(open_store(url))
        server.shutdown()
