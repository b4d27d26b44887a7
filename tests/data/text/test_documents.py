"""Each format is read as it was written, and bad records are reported."""

import itertools
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import FormatName
from data.text.documents import read_documents
from data.text.files import Unit
from data.text.records import BadRecord, ReadSettings, Record
from tests.data.text.written_files import (
    COLUMN_FILES,
    LINE_FILES,
    Found,
    compress,
    encode_records,
    encode_table,
    good,
    named_file,
    read_file,
    write_file,
)

TEXT_FILES = ("a.txt", "a.txt.gz", "a.md.zst", "a", "a.json")


@pytest.mark.parametrize("name", [*LINE_FILES, *COLUMN_FILES])
@settings(max_examples=25, deadline=None)
@given(records=st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=9))
def test_records_are_read_back(name, records):
    with tempfile.TemporaryDirectory() as folder:
        file = write_file(Path(folder), name, encode_records(name, records))
        expected = [(key, text.encode(), True) for key, text in records]
        assert read_file(file) == expected
        result = read_file(file, ReadSettings())
        assert [record.text for record in good(result)] == [
            text for _, text, _ in expected
        ]
        assert len({record.id for record in good(result)}) == len(result)
        assert all(record.id.startswith(f"{name}:") for record in good(result))


@pytest.mark.parametrize("name", TEXT_FILES)
@settings(max_examples=25, deadline=None)
@given(text=st.binary())
def test_a_text_is_read_back(name, text):
    with tempfile.TemporaryDirectory() as folder:
        file = write_file(Path(folder), name, compress(name, text))
        expected = read_file(file, ReadSettings(keep_invalid_utf8=True))
        assert expected == [Record(name, text, ends=True)]
        try:
            text.decode()
        except UnicodeDecodeError as error:
            bad = BadRecord(file, f"byte {error.start}", "not UTF-8")
            # What was read before the error ends with an empty piece.
            assert read_file(file) == [bad, Record(name, b"", ends=True)]
        else:
            assert read_file(file, ReadSettings(format=FormatName.text)) == expected
            if b"\0" not in text:
                assert read_file(file) == expected


@pytest.mark.parametrize("before", [b"", b"a", "猫".encode() * 9, b"line\n" * 2**20])
def test_a_zero_byte_makes_a_text_binary_wherever_it_stands(tmp_path, before):
    file = write_file(tmp_path, "a.txt", before + b"\0 and more\n")
    *pieces, bad, last_piece = read_file(file)
    assert before.startswith(b"".join(piece.text for piece in good(pieces)))
    assert bad.location == f"byte {len(before)}"
    assert "a zero byte, the sign of binary data" in bad.reason
    assert last_piece.text == b""


LIMIT = 200
FAULTS = [
    (b'{"text": "a"', "no JSON: "),
    (b'{"text": "a"} {"text": "b"}', "no JSON: Extra data"),
    (b"\0\0\0\0", "no JSON: "),
    (b"[" * LIMIT * 500, "longer than max_record_bytes=200"),
    (b'{"id": 1, "text": "\xff"}', "not UTF-8"),
    (b'{"id": 1, "text": "\\ud800"}', "'text' holds half a surrogate pair"),
    (b'{"id": 1}', "no field 'text'"),
    (b'{"text": "a"}', "no field 'id'"),
    (b'{"id": 1, "text": 3}', "'text' is no text but int"),
    (b'{"id": 1, "text": ["a"]}', "'text' is no text but list"),
    (b'{"id": 1, "text": null}', "'text' is no text but null"),
    (b'{"id": [1], "text": "a"}', "'id' is no id but list"),
    (b'["a"]', "no JSON object but list"),
    (b"null", "no JSON object but NoneType"),
    (b'{"id": 1, "text": "%s"}' % (b"x" * LIMIT), "longer than max_record_bytes"),
]
UNUSUAL = [
    (b'{"id": 7, "text": "crlf"}\r', "7", "crlf"),
    (b' \t{"text": "\\u0000", "id": "nul", "x": NaN} ', "nul", "\0"),
    (b'{"id": "\\ud800", "text": "\\ud83d\\ude00"}', "?", "😀"),
    (b'{"id": "twice", "text": 1, "text": "last"}', "twice", "last"),
    (b'{"id": 1.5, "text": "ab", "x": %s1%s}' % (b"[" * 50, b"]" * 50), "1.5", "ab"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("last_newline", [b"\n", b""])
def test_each_bad_line_is_reported_and_hides_no_other(tmp_path, name, last_newline):
    content = bytearray(b"\xef\xbb\xbf")
    expected = []
    file = named_file(tmp_path / name, 0)
    for (bad, reason), good_line in zip(FAULTS, itertools.cycle(UNUSUAL), strict=False):
        fine, key, text = good_line
        expected.append((key, text.encode()))
        content += fine + b"\n\n \r\n"
        expected.append((f"byte {len(content)}", reason))
        content += bad + b"\n"
    content = content[:-1] + last_newline
    (tmp_path / name).write_bytes(compress(name, bytes(content)))
    settings = ReadSettings(id_field="id", max_record_bytes=LIMIT)
    whole_file = Unit(file)  # so that locations count from its start
    result = list(read_documents(whole_file, settings))
    for item, (id_or_location, text_or_reason) in zip(result, expected, strict=True):
        if isinstance(item, BadRecord):
            assert (item.file, item.location) == (file, id_or_location)
            assert text_or_reason in item.reason
        else:
            assert item == (id_or_location, text_or_reason, True)


def table_with_a_null_id(text: pa.Array) -> pa.Table:
    return pa.table({"id": pa.array(["x", None, "z"][: len(text)]), "text": text})


def read_table(folder: Path, name: str, table: pa.Table) -> Found:
    return read_file(write_file(folder, name, encode_table(name, table)))


def not_utf8(kind: pa.DataType) -> pa.Array:
    base = pa.large_binary() if kind == pa.large_string() else pa.binary()
    return pa.array([b"a", b"\xff", b"c"], base).view(kind)


@pytest.mark.parametrize("name", COLUMN_FILES)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (pa.array(["a", None, "c"]), "'text' is no text but null"),
        (pa.array(["a", None, "c"]).dictionary_encode(), "'text' is no text but null"),
        (pa.array(["a", "b" * 201, "c"]), "201 bytes, longer than"),
        (pa.array([b"a", b"\xff", b"c"]), "not UTF-8"),
        (not_utf8(pa.string()), "not UTF-8"),
        (not_utf8(pa.large_string()), "not UTF-8"),
    ],
)
def test_each_bad_row_is_reported_and_hides_no_other(tmp_path, name, text, reason):
    file = write_file(tmp_path, name, encode_table(name, table_with_a_null_id(text)))
    settings = ReadSettings(id_field="id", max_record_bytes=LIMIT)
    first, bad, last = read_file(file, settings)
    assert (first, last) == (("x", b"a", True), ("z", b"c", True))
    assert isinstance(bad, BadRecord)
    assert (bad.location, bad.file) == ("row 1", file)
    assert reason in bad.reason


@pytest.mark.parametrize("name", COLUMN_FILES)
def test_tables_without_usable_texts_are_reported(tmp_path, name):
    (bad,) = read_table(tmp_path, name, pa.table({"id": ["x"]}))
    assert isinstance(bad, BadRecord)
    assert bad.reason == "no column 'text'"
    numbers = read_table(tmp_path, name, table_with_a_null_id(pa.array([1, 2])))
    assert len(numbers) == 2
    for bad in numbers:
        assert isinstance(bad, BadRecord)
        assert "no text but int" in bad.reason
    assert (
        read_table(tmp_path, name, table_with_a_null_id(pa.array([], pa.string())))
        == []
    )


@pytest.mark.parametrize("name", COLUMN_FILES)
def test_ids_may_be_numbers_or_null_but_not_invalid(tmp_path, name):
    number = read_table(tmp_path, name, pa.table({"id": [5], "text": ["a"]}))
    assert number == [("5", b"a", True)]
    _, null = read_table(tmp_path, name, table_with_a_null_id(pa.array(["a", "b"])))
    assert null == (f"{name}:row 1", b"b", True)
    ids = pa.array([b"k", b"\xff"]).view(pa.string())
    fine, bad = read_table(tmp_path, name, pa.table({"id": ids, "text": ["a"] * 2}))
    assert fine == ("k", b"a", True)
    assert isinstance(bad, BadRecord)


def test_compressed_frames_one_after_another_are_one_text(tmp_path):
    for name in ("a.txt.gz", "a.txt.zst"):
        content = b"".join(compress(name, b"%d " % n) for n in range(2000))
        text = b"".join(b"%d " % n for n in range(2000))
        file = write_file(tmp_path, name, content)
        assert read_file(file) == [Record(name, text, True)]
        result = read_file(write_file(tmp_path, name, content + b"no frame"))
        assert result[0] == (name, text, True)
        assert isinstance(result[1], BadRecord)
