"""Records in tar, TFRecord and ArrayRecord files, and texts of several fields."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from data.catalog import FORMATS
from data.prepare_config import PrepareConfig
from data.text.files import File
from data.text.kinds import recognize
from data.text.records import BadRecord, ReadSettings, Record
from data.token_store.build import prepare_store
from tests.data.text.written_files import (
    Found,
    encode_table,
    good,
    named_file,
    read_file,
)

PLAIN = ReadSettings()


def write(folder: Path, name: str, content: bytes) -> File:
    """Write a file, and recognize its format."""
    path = folder / name
    path.write_bytes(content)
    file = recognize(named_file(path, len(content)), PLAIN, FORMATS)
    assert isinstance(file, File)
    return file


def tar_of(members: Sequence[tuple[str, bytes]], mode: str = "w") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as archive:  # type: ignore
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def masked(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    rotated = (crc >> 15) + (crc << 17 & 0xFFFFFFFF)
    return struct.pack("<I", (rotated + 0xA282EAD8) % 2**32)


def tfrecord_of(records: Sequence[bytes]) -> bytes:
    content = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        content += length + masked(length) + record + masked(record)
    return content


def field(number: int, content: bytes) -> bytes:
    """Return a field of protobuf, by RFC-like rules: tag, length, content."""
    size = len(content)
    varint = bytes([size & 127 | 128, size >> 7]) if size > 127 else bytes([size])
    return bytes([number << 3 | 2]) + varint + content


def example_of(features: dict[str, bytes]) -> bytes:
    entries = b""
    for key, value in features.items():
        feature = field(1, field(1, value))
        entries += field(1, field(1, key.encode()) + field(2, feature))
    return field(1, entries)


def array_record_of(path: Path, records: Sequence[bytes]) -> bytes:
    writer = ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()


SAMPLES = [
    ("000/a.jpg", b"\xff\xd8\xff\0"),
    ("000/a.txt", "猫 sat".encode()),
    ("000/a.json", b'{"width": 3}'),
    ("000/b.json", b'{"text": "from a record", "n": 1}'),
    ("000/b.cls", b"7"),
]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "unnamed"])
def test_samples_of_webdataset_are_read(tmp_path, name):
    """The text is the .txt, or the field of the .json; the rest is left out."""
    mode = "w:gz" if name.endswith("gz") else "w"
    file = write(tmp_path, name, tar_of(SAMPLES, mode))
    assert file.format.name == "tar"
    assert read_file(file, PLAIN) == [
        Record(f"{name}:000/a", "猫 sat".encode()),
        Record(f"{name}:000/b", b"from a record"),
    ]


def test_bad_samples_are_named_and_the_others_read(tmp_path):
    members = [
        ("a.json", b'{"body": "x"}'),
        ("b.json", b"{"),
        ("c.txt", b"\xff"),
        ("d.png", b"\x89PNG"),
        ("e.txt", b"good"),
    ]
    content = tar_of(members)
    found = read_file(write(tmp_path, "a.tar", content), PLAIN)
    reasons = [r.reason for r in found if isinstance(r, BadRecord)]
    assert [r.text for r in good(found)] == [b"good"]
    assert reasons[0] == "no field 'text' among body"
    assert reasons[1].startswith("no JSON")
    assert reasons[2:] == ["not UTF-8", "no .txt and no .json among png"]
    cut = write(tmp_path, "cut.tar", content[: 512 * 8 + 7])
    assert "cannot be read further" in bad_reason(read_file(cut, PLAIN))
    small = ReadSettings(max_record_bytes=9)
    found = read_file(write(tmp_path, "b.tar", tar_of(members)), small)
    assert "longer than max_record_bytes=9" in bad_reason(found[:1])


def bad_reason(found: Found) -> str:
    last = found[-1]
    assert isinstance(last, BadRecord)
    return last.reason


TEXTS = [b"first text", "zweite Zeile\nü".encode(), b"", b"\nthird"]
EXAMPLES = [example_of({"text": t, "id": b"%d" % i}) for i, t in enumerate(TEXTS)]


@pytest.mark.parametrize("records", [TEXTS, EXAMPLES], ids=["text", "example"])
@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz", "b", "a.array_record"])
def test_records_of_text_and_examples_are_read(tmp_path, name, records):
    if "array" in name:
        content = array_record_of(tmp_path / "written", records)
    else:
        content = tfrecord_of(records)
        content = gzip.compress(content) if name.endswith("gz") else content
    found = read_file(write(tmp_path, name, content), PLAIN)
    assert [record.text for record in good(found)] == TEXTS
    ids = [record.id for record in good(found)]
    assert ids == [f"{name}:record {number}" for number in range(len(TEXTS))]
    if records is EXAMPLES:
        with_ids = ReadSettings(id_field="id")
        found = read_file(write(tmp_path, name, content), with_ids)
        assert [record.id for record in good(found)] == ["0", "1", "2", "3"]


def test_damaged_records_are_named(tmp_path):
    content = tfrecord_of(TEXTS)
    flipped = bytearray(content)
    flipped[14] ^= 1
    found = read_file(write(tmp_path, "a.tfrecord", bytes(flipped)), PLAIN)
    assert isinstance(found[0], BadRecord)
    assert found[0].location == "record 0"
    assert found[0].reason == "its checksum is different"
    assert [record.text for record in good(found)] == TEXTS[1:]
    for name, damaged in {
        "cut": content[:-9],
        "header": content[:-30],
        "length": content[:26] + b"\xff" + content[27:],
        "z.gz": gzip.compress(content)[:-12],
    }.items():
        file = write(tmp_path, f"{name}.tfrecord", damaged)
        assert "cannot be read further" in bad_reason(read_file(file, PLAIN))
    array = array_record_of(tmp_path / "written", TEXTS)
    file = write(tmp_path, "a.array_record", array[: len(array) // 2])
    assert "no whole ArrayRecord" in bad_reason(read_file(file, PLAIN))
    other = write(tmp_path, "o.tfrecord", tfrecord_of([example_of({"a": b"b"})]))
    assert bad_reason(read_file(other, PLAIN)) == "no field 'text' among a"


RECORD = {"title": "A title", "doc": {"body": {"raw": "The body"}}, "a.b": "flat"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("doc.body.raw", "The body"),
        ("a.b", "flat"),
        (("title", "doc.body.raw"), "A title | The body"),
        (("title", "a.b"), "A title | flat"),
    ],
)
def test_nested_fields_and_several_fields_make_a_text(tmp_path, name, fields, text):
    if name.endswith(".parquet"):
        content = encode_table(name, pa.Table.from_pylist([RECORD, RECORD]))
    elif name.endswith(".csv"):
        if "doc" in str(fields):
            pytest.skip("a table of text has no nested columns")
        content = b"title,a.b\nA title,flat\nA title,flat\n"
    else:
        rows = [json.dumps(RECORD)] * 2
        content = ("\n" if name == "a.jsonl" else " ").join(rows).encode()
    settings = ReadSettings(fields, text_separator=" | ")
    found = read_file(write(tmp_path, name, content), settings)
    assert [record.text.decode() for record in good(found)] == [text, text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_missing_nested_field_is_a_bad_record(tmp_path, name):
    content = json.dumps(RECORD).encode()
    if name == "a.parquet":
        content = encode_table(name, pa.Table.from_pylist([RECORD]))
    for missing in ("doc.nothing", "title.raw", ("title", "nothing")):
        settings = ReadSettings(missing)
        found = read_file(write(tmp_path, name, content), settings)
        assert len(found) == 1
        assert isinstance(found[0], BadRecord)


def test_a_store_of_joined_fields_is_another_store(tmp_path):
    """The separator is part of what a store is made of, but only if it has a use."""
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(RECORD)}\n" * 9)
    hashes = set()
    for number, (fields, separator) in enumerate(
        [
            ("title", r"\n\n"),
            ("title", "-"),
            (["title", "a.b"], r"\n"),
            (["title", "a.b"], "-"),
        ]
    ):
        config = PrepareConfig(
            str(tmp_path / "a.jsonl"),
            str(tmp_path / str(number)),
            text_field=fields,
            text_separator=separator,
            validation=0,
        )
        store = prepare_store(config, FORMATS)
        hashes.add(store.manifest["made_of"])
        if number == 2:
            assert store.text("train", 12) == b"A title\nflat"
    assert len(hashes) == 3
