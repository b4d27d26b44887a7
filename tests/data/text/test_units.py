"""Units of a file, and a single text that is divided: nothing is lost or read twice."""

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

import data.text.files
import data.text.streams
from data.errors import DataError
from data.text.corpus import Corpus
from data.text.documents import read_documents
from data.text.files import SPLITS, Unit, units_of
from data.text.records import BadRecord, ReadSettings
from tests.data.text.written_files import compress, file_of, good, read_file

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
        file = file_of(Path(folder), "a.jsonl", b"\n".join(lines))
        whole = list(read_documents(Unit(file), settings))
        with mock.patch.object(data.text.files, "UNIT_BYTES", unit_bytes):
            assert len(units_of(file)) == max(1, -(-file.size // unit_bytes))
            assert read_file(file, settings) == whole


@pytest.fixture(scope="module")
def unit_folder(tmp_path_factory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("units")


# A zero byte would be refused as binary data.
binary = st.binary().map(lambda text: text.replace(b"\0", b"\1"))
texts = st.one_of(st.text("ab\n猫é😀 ", max_size=150).map(str.encode), binary)
# Of units, and of the windows behind them, which must be smaller.
sizes = st.integers(5, 40).flatmap(
    lambda u: st.tuples(st.just(u), st.integers(4, u - 1))
)


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes)
def test_units_of_a_text_are_the_text(unit_folder, text, size):
    valid = text.decode(errors="ignore").encode() == text
    settings = ReadSettings(keep_invalid_utf8=not valid)
    found = {}
    with (
        mock.patch.object(data.text.files, "UNIT_BYTES", size[0]),
        mock.patch.object(data.text.streams, "CUT_WINDOW", size[1]),
    ):
        for name in ("a.txt", "a.txt.gz"):
            file = file_of(unit_folder, name, compress(name, text))
            found[name] = good(read_file(file, settings))
            assert b"".join(one.text for one in found[name]) == text
            ends = [one.ends for one in found[name]]
            assert ends == [False] * (len(ends) - 1) + [True]
    if valid:
        for one in found["a.txt"]:
            one.text.decode()

    plain, packed = ([one[1:] for one in records] for records in found.values())
    assert plain == packed, "compressed text must give the same tokens"


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes, validation=st.floats(0.01, 0.99))
def test_a_single_text_is_divided_without_a_byte_in_both(
    unit_folder, text, size, validation
):
    settings = ReadSettings(keep_invalid_utf8=True)
    with (
        mock.patch.object(data.text.files, "UNIT_BYTES", size[0]),
        mock.patch.object(data.text.streams, "CUT_WINDOW", size[1]),
    ):
        pieces = []
        for name in ("a.txt", "a.txt.zst"):
            file = file_of(unit_folder, name, compress(name, text))
            try:
                units = Corpus("", (file,), validation).units()
            except DataError:
                assert len(text) * min(validation, 1 - validation) < 4
                return
            found = [
                (unit.split, one.text, one.ends)
                for unit in units
                for one in good(list(read_documents(unit, settings)))
            ]
            assert [split for split, _, ends in found if ends] == list(SPLITS)
            # A last piece may be empty: it stands for the end alone.
            pieces.append([(split, one) for split, one, _ in found if one])
    assert b"".join(one for _, one in pieces[0]) == text
    held = sum(len(one) for split, one in pieces[0] if split == "validation")
    assert abs(held - len(text) * validation) <= 4
    assert pieces[0] == pieces[1]


def test_a_broken_single_text_is_reported_wherever_it_is_divided(tmp_path):
    content = gzip.compress(random.Random(0).randbytes(3000).hex().encode(), mtime=0)
    file = file_of(tmp_path, "a.txt.gz", content[:-20])
    for validation in (0.0, 0.001, 0.1, 0.9):
        units = Corpus("", (file,), validation).units()
        found = [one for unit in units for one in read_documents(unit, ReadSettings())]
        assert [one.reason for one in found if isinstance(one, BadRecord)] == [
            "cannot be read further: the compressed file ends in the middle"
        ]
        assert sum(len(one.text) for one in good(found)) > 5000
