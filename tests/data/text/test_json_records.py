"""JSON records are read from an array, or one after the other."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text.json_formats import JSON
from data.text.records import BadRecord, ReadSettings
from tests.data.text.written_files import WITH_IDS, Found, compress, good, write_file
from tests.data.text.written_files import read_file as read


def read_json(folder: Path, content: bytes, name: str = "a.json", **limits) -> Found:
    file = write_file(folder, name, compress(name, content))
    return read(replace(file, format=JSON), ReadSettings(id_field="id", **limits))


@settings(max_examples=150, deadline=None)
@given(
    records=st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=9),
    indent=st.none() | st.integers(0, 3),
    is_array=st.booleans(),
    is_ascii=st.booleans(),
    name=st.sampled_from(["a.json", "a.json.gz"]),
)
def test_records_are_read_back(records, indent, is_array, is_ascii, name):
    values = [{"id": key, "n": [{}], "text": text} for key, text in records]
    lines = [json.dumps(v, indent=indent, ensure_ascii=is_ascii) for v in values]
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii)
    text = text if is_array else " \n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        result = read_json(Path(folder), text.encode(errors="replace"), name)
    expected = [(key, text.encode(errors="replace"), True) for key, text in records]
    assert result == expected


def test_blocks_may_end_anywhere(tmp_path):
    values = [{"id": str(n), "text": "猫" * (n * 997 % 5000)} for n in range(99)]
    content = json.dumps(values, indent=1, ensure_ascii=False).encode()
    assert len(content) > 2**19
    result = read_json(tmp_path, content)
    assert [record.text.decode() for record in good(result)] == [
        v["text"] for v in values
    ]


@pytest.mark.parametrize(
    ("content", "num_good", "reason"),
    [
        (b'[{"id": 1, "text": "a"}, 3, {"id": 2, "text": "b"}]', 2, "object but int"),
        (b'[{"id": 1, "text": 3}, {"id": 2, "text": "b"}]', 1, "no text but int"),
        (b'[{"id": 1}, {"id": 2, "text": "b"}]', 1, "no field 'text'"),
        (b'[{"id": 1, "text": "\xff"}, {"id": 2, "text": "b"}]', 1, "surrogate"),
        (b'[{"id": 1, "text": "a"}, {"id": 2, "te', 1, "cannot be read further"),
        (b'[{"id": 1, "text": "a"}, {"id": 2', 1, "cannot be read further"),
        (b'[{"id": 1, "text": "a"},', 1, "the array does not end"),
        (b'[{"id": 1, "text": "a"}', 1, "the array does not end"),
        (b'[{"id": 1, "text": "a"} {"id": 2, "text": "b"}]', 1, "a comma is missing"),
        (b'[{"id": 1, "text": "a"}] and more', 1, "text follows the records"),
        (b'{"id": 1, "text": "a"} and more', 1, "cannot be read further"),
        (
            b'[{"id": 1, "text": "a"}, {"id": 2, "text": "%s"}]' % (b"x" * 300),
            1,
            "long",
        ),
        (b'[{"id": 1, "text": "a"}, {"x": %s' % (b"[" * 10**5), 1, "further"),
    ],
)
def test_unusable_records_are_reported(tmp_path, content, num_good, reason):
    result = read_json(tmp_path, content, max_record_bytes=200)
    assert len(good(result)) == num_good
    (bad,) = [item for item in result if isinstance(item, BadRecord)]
    assert reason in bad.reason
    number = int(bad.location.removeprefix("byte "))
    assert 0 <= number <= len(content)


def test_text_before_damage_is_read(tmp_path):
    values = [{"id": str(n), "text": f"text {n * 7919}"} for n in range(3000)]
    content = compress("a.json.gz", json.dumps(values).encode())
    file = write_file(tmp_path, "a.json.gz", content[: len(content) // 2])
    *result, bad = read(replace(file, format=JSON), WITH_IDS)
    assert isinstance(bad, BadRecord)
    assert "the compressed file ends in the middle" in bad.reason
    assert len(result) > 900
    expected = [(v["id"], v["text"].encode(), True) for v in values[: len(result)]]
    assert result == expected
