"""The content of a file decides its format if its name does not."""

import array
import bz2
import gzip
import io
import json
import lzma
import random
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.catalog import FORMATS
from data.config import FormatName
from data.errors import DataError
from data.text import json_formats, streams
from data.text.documents import read_documents
from data.text.files import Format, units_of
from data.text.kinds import Refusal, recognize
from data.text.plain_text import TEXT
from data.text.records import BadRecord, ReadSettings
from tests.data.text.written_files import (
    Found,
    encode_table,
    frame_of_zstd,
    good,
    named_file,
)

RECORDS = [{"text": f"document {n} [with] {{}}\nlines 猫", "n": n} for n in range(9)]
TEXTS = [str(record["text"]).encode() for record in RECORDS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS).encode()
SPREAD = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()
JOINED = "".join(json.dumps(record, indent=1) for record in RECORDS).encode()


def write_and_read(
    path: Path, content: bytes, **settings
) -> tuple[Format, Found] | Refusal:
    path.write_bytes(content)
    read_settings = ReadSettings(**settings)
    file = recognize(named_file(path, len(content)), read_settings, FORMATS)
    if isinstance(file, Refusal):
        return file
    units = units_of(file)
    return file.format, [
        record for unit in units for record in read_documents(unit, read_settings)
    ]


NAMES = ["a.json", "a.jsonlines", "a.ndjson", "a.JSONL", "part-00000", "a.txt", "a.dat"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [LINES, ARRAY, SPREAD, JOINED])
@pytest.mark.parametrize("change", ["none", "crlf", "bom", "space", "gzip", "zstd"])
def test_records_are_read_under_any_name(tmp_path, name, content, change):
    match change:
        case "crlf":
            content = content.replace(b"\n", b"\r\n")
        case "bom":
            content = b"\xef\xbb\xbf" + content
        case "space":
            content = b" \n\n" + content + b"\n\n"
        case "gzip":
            content = gzip.compress(content)
        case "zstd":
            content = zstandard.ZstdCompressor().compress(content)
    result = write_and_read(tmp_path / name, content)
    assert not isinstance(result, Refusal)
    texts = [record.text for record in good(result[1])]
    assert [text.replace(b"\r\n", b"\n") for text in texts] == TEXTS
    assert len({record.id for record in good(result[1])}) == len(TEXTS)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "part-0", "part-0.gz"])
@pytest.mark.parametrize("content", [LINES, ARRAY])
def test_compression_does_not_change_how_a_file_is_read(tmp_path, name, content):
    is_packed = name.endswith(".gz")
    result = write_and_read(
        tmp_path / name, gzip.compress(content) if is_packed else content
    )
    assert not isinstance(result, Refusal)
    assert [record.text for record in good(result[1])] == TEXTS


@pytest.mark.parametrize("name", ["a.json", "part-0", "a.jsonl"])
@pytest.mark.parametrize("size", [2**16 - 40, 2**16, 10**6])
def test_the_first_record_may_be_long(tmp_path, name, size):
    records = [{"text": "a" * size}, {"text": "b"}]
    for content in (
        "".join(json.dumps(record) + "\n" for record in records),
        json.dumps(records),
        json.dumps(records, indent=2),
    ):
        result = write_and_read(tmp_path / name, content.encode())
        assert not isinstance(result, Refusal)
        assert [len(item.text) for item in good(result[1])] == [size, 1]


PLAIN = {
    "config.json": json.dumps({"name": "x", "list": [{"a": 1}]}, indent=2),
    "one_line.json": '{"name": "x", "version": 1}\n',
    "numbers.json": "[1, 2, 3]",
    "strings.json": '["a", "b"]',
    "empty.json": "{}",
    "no_records.json": "[]",
    "broken.json": '{"text": ',
    "brace.txt": "{ a text that begins\nwith a brace }\n" * 9,
    "bracket.txt": '[ ] one\n[x] two\n["three\n',
    "quoted": '{"this is no JSON", said the cat}\n' * 3,
    "link.md": "[text](https://example.org)\n\n[more](x)",
    "example.md": '# Records\n```\n{"text": "a"}\n{"text": "b"}\n```\n',
    "code.c": '{\n  int x = {"a"};\n}\n',
    "list.py": '[{"a": 1},\n {"b": f(2)}]\n',
    "list.js": '[{"a": 1}].map(f)\n',
    "braces.tex": "{}\n{}\n{}\n\\bf\n",
    "table.md": "id,text\n1,a\n",
    "Makefile": "all:\n\techo '{\"text\": 1}'\n",
    "notebook.ipynb": json.dumps({"cells": [{"source": ["x"]}], "nbformat": 4}),
    "words.bin": "plain words\n",
    "PAR1.txt": "PAR1 is how a parquet file begins, and ORC how the other does",
    "BZh.txt": "BZh91 is how bzip2 begins",
    "nothing": "",
}


@pytest.mark.parametrize("name", PLAIN)
def test_other_text_stays_text(tmp_path, name):
    content = PLAIN[name].encode()
    result = write_and_read(tmp_path / name, content)
    assert result == (TEXT, [(name, content, True)])


@pytest.mark.parametrize("name", ["a.json", "part-0"])
@pytest.mark.parametrize("form", ["lines", "array", "spread"])
def test_records_without_the_field_are_no_text(tmp_path, name, form):
    records = [{"content": "a", "id": 1}, {"content": "b", "id": 2}]
    content = json.dumps(records, indent=2 if form == "spread" else None)
    if form == "lines":
        content = "".join(json.dumps(record) + "\n" for record in records)
    result = write_and_read(tmp_path / name, content.encode())
    assert not isinstance(result, Refusal)
    assert all("no field 'text' among" in item.reason for item in result[1])  # type: ignore
    result = write_and_read(tmp_path / name, content.encode(), text_field="content")
    assert not isinstance(result, Refusal)
    assert [item.text for item in good(result[1])] == [b"a", b"b"]


def test_a_file_may_be_one_record(tmp_path):
    for indent in (None, 2):
        content = json.dumps(RECORDS[0], indent=indent).encode()
        result = write_and_read(tmp_path / "00001.json", content)
        assert not isinstance(result, Refusal)
        assert [record.text for record in good(result[1])] == TEXTS[:1]


@pytest.mark.parametrize("name", ["a.json", "part-0"])
def test_a_damaged_record_does_not_turn_the_others_into_text(tmp_path, name):
    for content in (
        b'{"text": "a"\n' + LINES,
        LINES + b'{"text',
        LINES[:-9] + b"\xff\n",
    ):
        result = write_and_read(tmp_path / name, content)
        assert not isinstance(result, Refusal)
        assert result[0] == json_formats.LINES
        assert len(good(result[1])) >= 8
        assert len(result[1]) == len(good(result[1])) + 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "part-0"])
def test_zero_bytes_in_a_record_hide_no_other(tmp_path, name):
    result = write_and_read(tmp_path / name, LINES + b"\0\0\0\n" + LINES)
    assert not isinstance(result, Refusal)
    assert [record.text for record in good(result[1])] == TEXTS * 2
    assert len(result[1]) == 2 * len(TEXTS) + 1


@pytest.mark.parametrize(
    "value",
    [
        {"version": 1, "data": RECORDS},
        {"text": ["a", "b"], "n": [1, 2]},
        {"text": {"0": "a", "1": "b"}},
    ],
)
def test_records_inside_one_object_are_refused(tmp_path, value):
    for indent in (None, 2):
        content = json.dumps(value, indent=indent).encode()
        result = write_and_read(tmp_path / "a.json", content)
        assert isinstance(result, Refusal)
        assert "holds records in its field" in result.kind


@pytest.mark.parametrize("name", ["a.json", "a.JSON", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_of_texts_are_refused(tmp_path, name, indent):
    content = json.dumps(["one text", "another"], indent=indent).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    result = write_and_read(tmp_path / name, content)
    assert isinstance(result, Refusal)
    assert "texts instead of records" in result.kind


def in_zip(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.txt", content)
    return sink.getvalue()


def array_of_numpy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.arange(9))
    return sink.getvalue()


def ids(high: int) -> bytes:
    source = random.Random(0)
    return array.array("H", [source.randrange(high) for _ in range(999)]).tobytes()


REFUSED = {
    "a.zip": (in_zip(b"x"), "a zip archive"),
    "a.docx": (in_zip(b"x"), "a zip archive"),
    "a.csv": (in_zip(b"x"), "a zip archive"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive"),
    "a.txt.bz2": (bz2.compress(b"x"), "compressed with bzip2"),
    "a.jsonl.bz2": (bz2.compress(LINES), "compressed with bzip2"),
    "unnamed-bz2": (bz2.compress(b"x"), "compressed with bzip2"),
    "a.txt.xz": (lzma.compress(b"x"), "compressed with xz"),
    "unnamed-xz": (lzma.compress(b"x"), "compressed with xz"),
    "a.txt.lz4": (b"\x04\x22\x4d\x18\0", "compressed with lz4"),
    "twice.gz": (gzip.compress(gzip.compress(b"x")), "gzip twice"),
    "a.npy": (array_of_numpy(), "an array of NumPy"),
    "train.bin": (ids(100), "perhaps token ids"),
    "gpt2.bin": (ids(50257), "perhaps token ids"),
    "tokens.idx": (b"MMIDIDX\0\0", "perhaps token ids"),
    "zero": (b"valid UTF-8\0", "binary data"),
    "zero.gz": (gzip.compress(b"valid UTF-8\0"), "binary data"),
    "little.txt": ("naïve".encode("utf-16"), "UTF-16"),
    "big.txt": (b"\xfe\xff" + "naïve".encode("utf-16-be"), "UTF-16"),
    "wide.txt": ("naïve".encode("utf-32"), "UTF-32"),
    "records.json": (LINES.decode().encode("utf-16"), "UTF-16"),
    "a.pdf": (b"%PDF-1.7\n1 0 obj\n", "a PDF"),
    "a.jpg": (b"\xff\xd8\xff\xe0", "an image"),
    "a.sqlite": (b"SQLite format 3\0", "an SQLite database"),
    "a.parquet.gz": (
        gzip.compress(encode_table("a.parquet", pa.table({"text": ["a"]}))),
        "parquet inside .gz",
    ),
    "table.gz": (
        gzip.compress(encode_table("a.parquet", pa.table({"text": ["a"]}))),
        "parquet inside .gz",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_files_are_refused_by_their_kind(tmp_path, name):
    content, kind = REFUSED[name]
    result = write_and_read(tmp_path / name, content)
    assert isinstance(result, Refusal)
    assert kind in result.kind
    assert result.remedy


@pytest.mark.parametrize("name", ["a.feather", "part-0", "a.bin", "a.txt"])
def test_tables_are_known_by_their_first_bytes(tmp_path, name):
    table = pa.table({"text": ["a", "b"]})
    for content in (
        encode_table("a.parquet", table),
        encode_table("file.arrow", table),
        encode_table("stream.arrow", table),
    ):
        result = write_and_read(tmp_path / name, content)
        assert not isinstance(result, Refusal)
        assert [record.text for record in good(result[1])] == [b"a", b"b"]


def test_a_configured_format_overrides_the_content(tmp_path):
    for content in (LINES, ARRAY, b"a\0b", b"%PDF-1.7", b"id,text\n1,a\n"):
        for name in ("a.jsonl", "a.json", "a.csv", "a.txt", "a"):
            result = write_and_read(tmp_path / name, content, format=FormatName.text)
            assert result == (TEXT, [(name, content, True)])
    result = write_and_read(
        tmp_path / "a.txt", b"id,text\n1,a\n", format=FormatName.csv
    )
    assert not isinstance(result, Refusal)
    assert [record.text for record in good(result[1])] == [b"a"]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), sink)
    result = write_and_read(
        tmp_path / "a.txt", sink.getvalue(), format=FormatName.parquet
    )
    assert not isinstance(result, Refusal)
    assert [record.text for record in good(result[1])] == [b"a"]


@pytest.mark.parametrize("log", [10, 17, 27, 28, 30, 31])
def test_windows_of_zstd_up_to_2_gib_are_read(tmp_path, log):
    for name in ("a.txt.zst", "part-0", "a.json.zst"):
        content = LINES if "json" in name else b"some text"
        path = tmp_path / name
        path.write_bytes(frame_of_zstd(content, 17) + frame_of_zstd(content, log))
        file = recognize(named_file(path), ReadSettings(), FORMATS)
        assert not isinstance(file, Refusal)
        assert file.window_bytes == max(2**17, 2**log)
        result = list(read_documents(units_of(file)[0], ReadSettings()))
        assert len(result) == len(good(result))
        assert b"".join(record.text for record in good(result)) == (
            b"".join(TEXTS * 2) if "json" in name else content * 2
        )


def test_a_window_that_needs_too_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "available_memory", lambda: 2**30)
    for log in (17, 27, 30):
        (tmp_path / "a.zst").write_bytes(frame_of_zstd(b"text", log))
        recognize(named_file(tmp_path / "a.zst"), ReadSettings(), FORMATS)
    (tmp_path / "a.zst").write_bytes(frame_of_zstd(b"text", 31))
    message = (
        r"a\.zst: was compressed by zstd with a window of 2\.0 GiB.* only 1\.0 GiB"
    )
    with pytest.raises(DataError, match=message):
        recognize(named_file(tmp_path / "a.zst"), ReadSettings(), FORMATS)


@pytest.mark.parametrize("log", [32, 41])  # 4 GiB, and more than any memory
def test_a_window_beyond_2_gib_is_reported(tmp_path, log):
    (tmp_path / "a.zst").write_bytes(frame_of_zstd(b"text", log))
    file = recognize(named_file(tmp_path / "a.zst"), ReadSettings(), FORMATS)
    assert not isinstance(file, Refusal)
    *_, bad = read_documents(units_of(file)[0], ReadSettings())
    assert isinstance(bad, BadRecord)
    assert "too much memory" in bad.reason
