"""Text that is cut into units or divided into splits is read exactly once."""

import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.splits import SPLITS
from data.text import files, streams
from data.text.corpus import Corpus
from data.text.documents import read_documents
from data.text.files import Unit, units_of
from data.text.records import BadRecord, ReadSettings
from tests.data.text.written_files import compress, good, read_file, write_file

line = st.one_of(
    st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")),
    st.builds(
        lambda text: json.dumps({"text": text}).encode(), st.text("ab猫", max_size=40)
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(line, max_size=12), st.integers(1, 60), st.integers(1, 60))
def test_units_give_each_line_once_in_order(lines, unit_bytes, limit):
    settings = ReadSettings(max_record_bytes=limit)
    with tempfile.TemporaryDirectory() as folder:
        file = write_file(Path(folder), "a.jsonl", b"\n".join(lines))
        expected = list(read_documents(Unit(file), settings))
        with mock.patch.object(files, "UNIT_BYTES", unit_bytes):
            assert len(units_of(file)) == max(1, -(-file.size // unit_bytes))
            assert read_file(file, settings) == expected


@pytest.fixture(scope="module")
def unit_folder(tmp_path_factory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("units")


# A zero byte would be refused as binary data.
binary = st.binary().map(lambda text: text.replace(b"\0", b"\1"))
texts = st.one_of(st.text("ab\n猫é😀 ", max_size=150).map(str.encode), binary)
# Each pair is the size of a unit, and of the window after it, which is smaller.
sizes = st.integers(5, 40).flatmap(
    lambda u: st.tuples(st.just(u), st.integers(4, u - 1))
)


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes)
def test_units_of_a_text_add_up_to_the_text(unit_folder, text, size):
    valid = text.decode(errors="ignore").encode() == text
    settings = ReadSettings(keep_invalid_utf8=not valid)
    records_by_name = {}
    with (
        mock.patch.object(files, "UNIT_BYTES", size[0]),
        mock.patch.object(streams, "CUT_WINDOW", size[1]),
    ):
        for name in ("a.txt", "a.txt.gz"):
            file = write_file(unit_folder, name, compress(name, text))
            records_by_name[name] = good(read_file(file, settings))
            assert b"".join(record.text for record in records_by_name[name]) == text
            ends = [record.ends for record in records_by_name[name]]
            assert ends == [False] * (len(ends) - 1) + [True]
    if valid:
        for record in records_by_name["a.txt"]:
            record.text.decode()

    plain, packed = (
        [record[1:] for record in records] for records in records_by_name.values()
    )
    assert plain == packed, "compressed text must give the same tokens"


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes, validation=st.floats(0.01, 0.99))
def test_a_single_text_is_divided_with_each_byte_in_one_split(
    unit_folder, text, size, validation
):
    settings = ReadSettings(keep_invalid_utf8=True)
    with (
        mock.patch.object(files, "UNIT_BYTES", size[0]),
        mock.patch.object(streams, "CUT_WINDOW", size[1]),
    ):
        pieces = []
        for name in ("a.txt", "a.txt.zst"):
            file = write_file(unit_folder, name, compress(name, text))
            try:
                units = Corpus("", (file,), validation).units()
            except DataError:
                assert len(text) * min(validation, 1 - validation) < 4
                return
            parts = [
                (unit.split, piece.text, piece.ends)
                for unit in units
                for piece in good(list(read_documents(unit, settings)))
            ]
            assert [split for split, _, ends in parts if ends] == list(SPLITS)
            # A last piece may be empty: it stands for the end alone.
            pieces.append([(split, piece) for split, piece, _ in parts if piece])
    assert b"".join(piece for _, piece in pieces[0]) == text
    validation_bytes = sum(
        len(piece) for split, piece in pieces[0] if split == "validation"
    )
    assert abs(validation_bytes - len(text) * validation) <= 4
    assert pieces[0] == pieces[1]


def test_a_broken_single_text_is_reported_wherever_it_is_divided(tmp_path):
    content = gzip.compress(random.Random(0).randbytes(3000).hex().encode(), mtime=0)
    file = write_file(tmp_path, "a.txt.gz", content[:-20])
    for validation in (0.0, 0.001, 0.1, 0.9):
        units = Corpus("", (file,), validation).units()
        result = [
            item for unit in units for item in read_documents(unit, ReadSettings())
        ]
        assert [item.reason for item in result if isinstance(item, BadRecord)] == [
            "cannot be read further: the compressed file ends in the middle"
        ]
        assert sum(len(item.text) for item in good(result)) > 5000
